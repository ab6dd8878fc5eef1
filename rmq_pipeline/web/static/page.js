// The parts of the page that htmx does not do: the dialog, and the time under the slider's thumb.
"use strict";

document.addEventListener("htmx:afterSwap", (event) => {
  const dialog = document.getElementById("dialog");
  if (event.detail.target === dialog && !dialog.open) {
    dialog.showModal();
  }
});

// The live part is replaced as a whole: what a person has opened in it stays open.
let opened = [];

document.addEventListener("htmx:sseBeforeMessage", () => {
  opened = [...document.querySelectorAll("#live details")].map((each) => each.open);
});

document.addEventListener("htmx:sseMessage", () => {
  document.querySelectorAll("#live details").forEach((each, number) => {
    each.open = opened[number] ?? false;
  });
});

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-close]")) {
    document.getElementById("dialog").close();
  }
});

document.addEventListener("input", (event) => {
  if (event.target.id === "slider") {
    const moment = new Date(Number(event.target.value));
    document.getElementById("thumb").textContent =
      moment.toISOString().replace("T", " ").slice(0, 19) + "Z";
  }
});

// A browser has six connections to a server: pages that nobody looks at must not hold them.
const sources = new Set();

htmx.createEventSource = (url) => {
  const source = new EventSource(url, { withCredentials: true });
  sources.add(source);
  return source;
};

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    sources.forEach((source) => source.close());
    sources.clear();
  } else if (document.querySelector("#live[sse-connect]")) {
    htmx.ajax("GET", location.pathname + location.search, { target: "#page" });
  }
});
