// The page Review: shows the post that the server has chosen for this tab, and sends the answers.
"use strict";

{
  const by = (id) => document.getElementById(id);
  let shown = null;
  let isBusy = false;

  // The name of this tab: the server shows its post to no other one.
  function reviewer() {
    let name = sessionStorage.getItem("reviewer");
    if (!name) {
      const bytes = crypto.getRandomValues(new Uint8Array(12));
      name = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
      sessionStorage.setItem("reviewer", name);
    }
    return name;
  }

  function setText(id, text) {
    by(id).textContent = text || "";
    by(id).hidden = !text;
  }

  function showProgress(progress) {
    const parts = [`${feedmill.number(progress.answers)} answers`];
    if (progress.skipped) parts.push(`${feedmill.number(progress.skipped)} skipped`);
    if (progress.accuracy) parts.push(progress.accuracy);
    if (progress.measuring) parts.push("measuring the accuracy …");
    by("progress").textContent = parts.join("; ");
    by("progress").dataset.answers = progress.answers;
    if (progress.measuring) setTimeout(look, 3000);
  }

  function show(state) {
    showProgress(state.progress);
    shown = state.post;
    by("post").hidden = shown === null;
    by("nothing").hidden = shown !== null;
    by("post").dataset.token = shown === null ? "" : shown.token;
    if (shown === null) return;
    setText("why", shown.why);
    setText("from", shown.from && ` · ${shown.from}`);
    setText("post-title", shown.title);
    setText("post-body", shown.body);
    setText("label", `now: ${shown.label}`);
    setText("other", shown.other && `another model: ${shown.other}`);
    by("link").hidden = !shown.link;
    if (shown.link) by("link").href = shown.link;
  }

  // One request at a time: a key that is pressed meanwhile is not for the post that comes.
  async function send(path, content = {}) {
    if (isBusy) return;
    isBusy = true;
    try {
      const state = await feedmill.sendJson(`/review/${path}`, { reviewer: reviewer(), ...content });
      show(state);
      if (state.undone === false) feedmill.say("There is no answer of yours to undo.");
    } catch (problem) {
      feedmill.say(problem.message);
      if (path === "answer") setTimeout(() => send("next"), 0);
    } finally {
      isBusy = false;
    }
  }

  async function look() {
    try {
      showProgress((await feedmill.sendJson("/review/progress", {})).progress);
    } catch (problem) {
      feedmill.say(problem.message);
    }
  }

  function choose(button) {
    const what = button.dataset.what;
    if (what === "undo") send("undo");
    else if (what === "quit") location.assign("/teach");
    else if (shown === null) feedmill.say("No post is shown.");
    else if (what === "skip") send("answer", { token: shown.token, skip: true });
    else if (what === "none") send("answer", { token: shown.token, label: null });
    else send("answer", { token: shown.token, label: button.dataset.label });
  }

  if (by("choices")) {
    for (const button of document.querySelectorAll("#choices button")) {
      button.addEventListener("click", () => choose(button));
      feedmill.onKey(button.dataset.key, () => choose(button));
    }
    by("again").addEventListener("click", () => send("next"));
    send("next");
  }
}
