"use strict";
// Where the page begins: the report where there is one, else the page that the address names.

let leave = () => {}; // ends the page that is open

function route() {
  if (location.hash && !location.hash.startsWith("#/")) return;
  leave();
  resized.disconnect();
  for (const chart of charts) chart.remove();
  const main = byId("main");
  main.replaceChildren();
  delete main.dataset.events;
  say("");
  const [path, query] = location.hash.slice(2).split("?");
  const wanted = new URLSearchParams(query ?? "");
  const [kind, ...rest] = path.split("/");
  const name = decodeURIComponent(rest.join("/"));
  showTitle(name || (path === "compare" ? "compare" : ""));
  if (kind === "run" && name) leave = runPage(main, name, wanted);
  else if (kind === "comparison" && name) leave = comparisonPage(main, name);
  else if (path === "compare") leave = comparePage(main, wanted.getAll("run"));
  else leave = listPage(main);
  main.querySelector("h1").focus({ preventScroll: true });
}

function showTitle(title) {
  byId("trail").textContent = title ? ` / ${title}` : "";
  document.title = title ? `${title} · esper` : "esper";
}

// The curves' colours are read when they are built, so they are built again with other colours.
function redrawAll() {
  for (const chart of charts) {
    if (!chart.plot) continue;
    chart.shape = null;
    chart.draw(chart.spec);
  }
}

function addHatch() {
  const pattern = {
    id: "hatch",
    width: 6,
    height: 6,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  };
  const hatch = svg("pattern", pattern, svg("path", { d: "M0 0V6", class: "hatch" }));
  document.body.append(svg("svg", { class: "hidden", "aria-hidden": "true" }, hatch));
}

function start() {
  addHatch();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  const data = byId("report-data");
  if (data) {
    reportPage(byId("main"), JSON.parse(data.textContent));
    return;
  }
  // the token is in a cookie by now, and must not be copied with the address
  const hasToken = new URLSearchParams(location.search).has("token");
  if (hasToken) history.replaceState(null, "", location.pathname + location.hash);
  addEventListener("hashchange", route);
  route();
}

start();
