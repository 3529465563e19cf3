// The page Teach: follows a lesson and a deployment, and shows their end.
"use strict";

{
  const lesson = document.getElementById("lesson");
  const deployment = document.getElementById("deployment");
  const bar = document.getElementById("bar");
  const workers = document.getElementById("workers");

  async function follow() {
    let state;
    try {
      state = await feedmill.send("/teach/state");
    } catch (problem) {
      feedmill.say(problem.message);
      setTimeout(follow, 5000);
      return;
    }
    const hasEnded = state.lesson.state !== lesson.dataset.state || state.deployment.state !== deployment.dataset.state;
    if (hasEnded) {
      location.reload();
      return;
    }
    if (bar) {
      document.getElementById("phase").textContent = state.lesson.phase;
      if (state.lesson.total) {
        bar.max = state.lesson.total;
        bar.value = state.lesson.done;
      } else {
        bar.removeAttribute("value");
      }
    }
    if (workers) {
      const lines = Object.entries(state.deployment.workers);
      workers.replaceChildren(...lines.map(([name, said]) => feedmill.element("li", { text: `${name} ${said}` })));
    }
    setTimeout(follow, 1000);
  }

  if (lesson.dataset.state === "running" || deployment.dataset.state === "running") follow();
}
