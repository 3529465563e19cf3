// The pages of runs: sends a dropped file, and keeps progress current.
"use strict";
{
  const INTERVAL_MS = 1500;
  const drop = document.getElementById("drop");

  async function fragment(path) {
    const answer = await fetch(path);
    if (!answer.ok || answer.redirected) throw new Error(`the server answers ${answer.status}`);
    // The server's template escapes every value; a parsed document runs no scripts.
    return new DOMParser().parseFromString(await answer.text(), "text/html").body;
  }

  function upload(file) {
    const state = document.getElementById("upload-state");
    const bar = document.getElementById("sent");
    const request = new XMLHttpRequest();   // fetch tells no progress
    request.open("POST", "/files/upload?name=" + encodeURIComponent(file.name));
    request.responseType = "json";
    request.upload.onprogress = (event) => { bar.value = event.loaded / Math.max(1, event.total); };
    request.onload = () => {
      const content = request.response;
      if (request.status === 200 && content) {
        location.assign(content.address);
        return;
      }
      bar.hidden = true;
      state.className = "problem";
      state.textContent = content && content.error ? content.error.message : `The server answers ${request.status}.`;
    };
    request.onerror = () => {
      bar.hidden = true;
      state.className = "problem";
      state.textContent = "The file could not be sent. Is the server running?";
    };
    bar.hidden = false;
    bar.value = 0;
    state.className = "";
    state.textContent = file.name;
    request.send(file);
  }

  if (drop) {
    const input = document.getElementById("file");
    input.addEventListener("change", () => { if (input.files.length) upload(input.files[0]); });
    feedmill.onKey("n", () => input.click());
    for (const kind of ["dragenter", "dragover"]) {
      addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
    }
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
    addEventListener("drop", (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      const files = event.dataTransfer.files;
      if (files.length > 1) feedmill.say("Drop one file at a time.");
      else if (files.length) upload(files[0]);
    });
  }

  // Change cells in place: a focused link keeps its focus.
  function renewRows(list, made) {
    const before = new Map([...list.querySelectorAll("tr[data-run]")].map((row) => [row.dataset.run, row]));
    const rows = [...made.querySelectorAll("tr[data-run]")];
    if (!before.size || rows.some((row) => !before.has(row.dataset.run))) {
      list.replaceChildren(...made.childNodes);
      return;
    }
    for (const row of rows) {
      const cells = before.get(row.dataset.run).cells;
      for (let place = 1; place < cells.length; place += 1) {
        if (cells[place].innerHTML !== row.cells[place].innerHTML) cells[place].replaceWith(row.cells[place].cloneNode(true));
      }
    }
  }

  const list = document.getElementById("runs");
  const run = document.getElementById("run");
  async function renew() {
    if (!document.hidden) {
      try {
        if (list) renewRows(list, await fragment(list.dataset.path));
        if (run) {
          run.replaceChildren(...(await fragment(run.dataset.path)).childNodes);
          const stop = document.getElementById("stop");
          if (stop && document.getElementById("run-state").dataset.isOver) stop.remove();
        }
      } catch (problem) {
        // The next look may succeed.
      }
    }
    setTimeout(renew, INTERVAL_MS);
  }
  if (list || run) setTimeout(renew, INTERVAL_MS);
}
