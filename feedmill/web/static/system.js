// The page of the system: keeps its figures current.
"use strict";
{
  const INTERVAL_MS = 5000;
  const state = document.getElementById("state");

  async function renew() {
    if (!document.hidden) {
      try {
        const answer = await fetch(state.dataset.path);
        if (answer.ok && !answer.redirected) {
          // The server's template escapes every value; a parsed document runs no scripts.
          const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
          state.replaceChildren(...parsed.body.childNodes);
        }
      } catch (problem) {
        // The next look may succeed.
      }
    }
    setTimeout(renew, INTERVAL_MS);
  }
  setTimeout(renew, INTERVAL_MS);

  feedmill.onKey("a", () => {
    const boxes = [...document.querySelectorAll("[name=entry]")];
    const all = boxes.every((box) => box.checked);
    for (const box of boxes) box.checked = !all;
  });
}
