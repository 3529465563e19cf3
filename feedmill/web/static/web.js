// What the scripts of all pages share, as `feedmill`. Data becomes text nodes only, never HTML.
"use strict";

const feedmill = {
  // Make an element. `attributes`: class, text, and others by name.
  element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (key === "text") made.textContent = value;
      else if (key === "class") made.className = value;
      else made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  },

  // Show a sentence for some seconds. Screen readers read it.
  say(text) {
    const notice = document.getElementById("notice");
    notice.textContent = text;
    notice.hidden = false;
    clearTimeout(feedmill.noticeTimer);
    feedmill.noticeTimer = setTimeout(() => { notice.hidden = true; }, 6000);
  },

  // Send a request; return the JSON of its answer. An error's message is what the server says.
  async send(path, options = {}) {
    let answer;
    try {
      answer = await fetch(path, options);
    } catch (problem) {
      throw new Error("The server does not answer. Is it running?");
    }
    const type = answer.headers.get("content-type") || "";
    const content = type.startsWith("application/json") ? await answer.json() : null;
    if (answer.status === 401) {
      location.assign("/login?next=" + encodeURIComponent(location.pathname + location.search));
    }
    if (!answer.ok) {
      throw new Error(content && content.error ? content.error.message : `The server answers ${answer.status}.`);
    }
    return content;
  },

  sendJson(path, content) {
    const headers = { "Content-Type": "application/json" };
    return feedmill.send(path, { method: "POST", headers, body: JSON.stringify(content) });
  },

  // Follow server-sent events. `handlers`: functions by kind of event, called with its data; `open`
  // and `lost` are called when the connection comes and goes. Returns a function that ends it.
  follow(path, handlers) {
    const source = new EventSource(path);
    for (const [kind, handle] of Object.entries(handlers)) {
      if (kind === "open") source.onopen = handle;
      else if (kind === "lost") source.onerror = handle;
      else source.addEventListener(kind, (event) => handle(JSON.parse(event.data), event));
    }
    addEventListener("pagehide", () => source.close());
    return () => source.close();
  },

  // Call a function when a key is pressed outside of a field. The help's list is in the template.
  onKey(key, handle) {
    feedmill.keys.set(key, handle);
  },
  keys: new Map(),

  time(seconds) {
    return new Date(seconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
  },

  number(value) {
    return value.toLocaleString("en-US");
  },
};

{
  const help = document.getElementById("help");
  const button = document.getElementById("help-button");
  let isGoing = false;

  function isField(target) {
    return target instanceof Element && target.closest("input, select, textarea, [contenteditable]") !== null
      && !target.matches("input[type=checkbox], input[type=radio], input[type=button]");
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
    if (isField(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (help && help.open) return;
    if (isGoing) {
      isGoing = false;
      const link = document.querySelector(`nav [data-go="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        link.click();
        return;
      }
    }
    if (feedmill.keys.has(event.key)) {
      event.preventDefault();
      feedmill.keys.get(event.key)(event);
    } else if (event.key === "g") {
      isGoing = true;
    } else if (event.key === "?" && help) {
      event.preventDefault();
      help.showModal();
    }
  });
  if (button && help) {
    button.hidden = false;
    button.addEventListener("click", () => help.showModal());
  }
}
