// The stream's page: adds posts as they are labelled, and redraws the chart from time to time.
"use strict";
{
  // Least time between two charts, and how often the time that one takes.
  const CHART_INTERVAL_MS = 5000;
  const CHART_REST = 10;
  const list = document.getElementById("posts");
  const chart = document.getElementById("chart");
  const state = document.getElementById("state");
  const pause = document.getElementById("pause");
  const empty = document.getElementById("empty");
  const most = Number(list.dataset.most);
  let waiting = [];   // rows that are not in the list yet, oldest first
  let isPaused = false;
  let isDrawing = false;
  let isChartOld = false;
  let count = 0;

  function colourOf(label) {
    for (const entry of chart.querySelectorAll("[data-label]")) {
      if (entry.dataset.label === label) return entry.dataset.colour;
    }
    return "others";
  }

  function timeText(seconds) {
    return new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
  }

  function draw(row) {
    const label = row.label === null ? `${row.name} (best: ${row.best})` : row.name;
    const small = feedmill.element("small", {}, feedmill.element("span", {
      class: "tag " + colourOf(row.name), text: `${label} ${row.score.toFixed(2)}`, "data-label": row.name,
    }));
    for (const text of [row.source, row.language, row.run && `run ${row.run}`]) {
      if (text) small.append(" ", feedmill.element("span", { text }));
    }
    if (row.created_utc !== null) small.append(" ", feedmill.element("time", { text: timeText(row.created_utc) }));
    const link = feedmill.element("a", { href: row.address, text: row.text || "(no text)" });
    return feedmill.element("li", { class: "new" }, link, " ", small);
  }

  function show() {
    isDrawing = false;
    if (isPaused) {
      pause.textContent = waiting.length ? `Continue (${waiting.length >= most ? most + "+" : waiting.length} new)` : "Continue";
      return;
    }
    const focused = document.activeElement;
    const keepsPlace = list.contains(focused) ? focused.getBoundingClientRect().top : null;
    for (const row of waiting) list.prepend(draw(row));
    waiting = [];
    while (list.children.length > most) list.lastElementChild.remove();
    if (keepsPlace !== null && list.contains(focused)) {
      scrollBy(0, focused.getBoundingClientRect().top - keepsPlace);
    }
    empty.hidden = list.children.length > 0;
    state.textContent = count ? `live · ${feedmill.number(count)} since you opened the page` : "live";
  }

  function showSoon() {
    if (isDrawing) return;
    isDrawing = true;
    setTimeout(show, 100);
  }

  feedmill.follow(list.dataset.events, {
    open: showSoon,
    message(row) {
      count += 1;
      isChartOld = true;
      waiting.push(row);
      if (waiting.length > most) waiting.shift();
      showSoon();
    },
    skipped(others) {
      count += others.count;
    },
    missed(results) {
      feedmill.say(`${results.count === null ? "Some" : feedmill.number(results.count)} results were trimmed from the stream before they could be shown.`);
    },
    lost() { state.textContent = "not connected; trying again"; },
  });

  async function drawChart() {
    const began = performance.now();
    if (isChartOld && !isPaused && !document.hidden) {
      isChartOld = false;
      try {
        const answer = await fetch(chart.dataset.path);
        if (answer.ok && !answer.redirected) {
          // The server's template escapes every value; a parsed document runs no scripts.
          const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
          chart.replaceChildren(...parsed.body.childNodes);
          for (const tag of list.querySelectorAll(".tag")) {
            tag.className = "tag " + colourOf(tag.dataset.label);
          }
        }
      } catch (problem) {
        isChartOld = true;
      }
    }
    setTimeout(drawChart, Math.max(CHART_INTERVAL_MS, CHART_REST * (performance.now() - began)));
  }
  setTimeout(drawChart, CHART_INTERVAL_MS);

  function toggle() {
    isPaused = !isPaused;
    pause.textContent = isPaused ? "Continue" : "Pause";
    pause.setAttribute("aria-pressed", String(isPaused));
    if (isPaused) state.textContent = "paused";
    showSoon();
  }

  function step(by) {
    const links = [...list.querySelectorAll("li > a")];
    const place = links.indexOf(document.activeElement);
    const next = links[Math.min(Math.max(place + by, 0), links.length - 1)];
    if (next) next.focus();
  }

  pause.hidden = false;
  pause.addEventListener("click", toggle);
  feedmill.onKey("p", toggle);
  feedmill.onKey("j", () => step(1));
  feedmill.onKey("k", () => step(-1));
  feedmill.onKey("/", () => document.querySelector("[name=words]").focus());
}
