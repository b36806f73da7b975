"use strict";
// The list of runs, from which some are chosen to be compared.

const LIST_HEAD = ["", "run", "status", "task", "policy", "progress", "best", "parameters",
  "changed"];
const FIRST_TEXT = 3; // the column of the first plain text: the task

// Returns what ends the page.
function listPage(main) {
  const chosen = new Set();
  const rows = new Map(); // name of a run -> its row
  const body = el("tbody");
  const none = el("p", { class: "quiet", hidden: "" },
    "No runs in this folder yet. Start one: esper run --out runs/first");
  const openComparison = () => { location.hash = `#/compare?${runsQuery([...chosen])}`; };
  const compare = el("button", { type: "button", disabled: "", onclick: openComparison }, "Compare");
  main.append(
    el("h1", { tabindex: -1 }, "Runs"),
    el("p", { class: "quiet" }, "Choose two or more to compare them. ", compare),
    el("table", { class: "runs" },
      el("caption", { class: "hidden" }, "Runs in this folder"),
      el("thead", {}, el("tr", {}, LIST_HEAD.map(listHead))),
      body),
    none);

  const toggle = (name) => (event) => {
    chosen[event.target.checked ? "add" : "delete"](name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  };

  return every(2, async () => {
    const { runs } = await ask("api/runs");
    none.hidden = runs.length > 0;
    for (const run of runs) {
      if (!rows.has(run.name)) rows.set(run.name, runRow(run, toggle(run.name)));
      fillRow(rows.get(run.name), run);
    }
    const nodes = runs.map((run) => rows.get(run.name));
    const isOther = nodes.length !== body.children.length
      || nodes.some((node, index) => body.children[index] !== node);
    if (isOther) body.replaceChildren(...nodes);
  });
}

function listHead(name) {
  return el("th", { scope: "col" }, name || el("span", { class: "hidden" }, "compare"));
}

function runRow({ name, kind }, ontoggle) {
  const isRun = kind !== "compare"; // a comparison has its own page, and is held against nothing
  const box = isRun
    ? el("input", { type: "checkbox", "aria-label": `compare ${name}`, onchange: ontoggle })
    : "";
  const link = el("a", { href: `#/${isRun ? "run" : "comparison"}/${address(name)}` }, name);
  const cells = LIST_HEAD.slice(2).map(() => el("td"));
  return el("tr", {}, el("td", {}, box), el("th", { scope: "row" }, link), cells);
}

// Changes only what is other than before, so that a reader's selection stays.
function fillRow(row, run) {
  if (row.status !== run.status) row.cells[FIRST_TEXT - 1].replaceChildren(badge(run.status));
  row.status = run.status;
  const texts = [
    run.task ?? "–",
    run.policy ?? "–",
    progressOf(run),
    bestOf(run),
    whole(run.params),
    ago(run.age_seconds),
  ];
  texts.forEach((text, index) => {
    const cell = row.cells[FIRST_TEXT + index];
    if (cell.textContent !== text) cell.textContent = text;
  });
}
