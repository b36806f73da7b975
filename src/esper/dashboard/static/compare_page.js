"use strict";
// Several runs side by side: their curves, and who leads by how much.

// Returns what ends the page.
function comparePage(main, names) {
  const grid = new ChartGrid("compare");
  const tables = el("div");
  main.append(
    el("h1", { tabindex: -1 }, `Compare ${plural(names.length, "run")}`),
    section("curves", "Curves", grid.node),
    section("table", "Table", tables));
  let shape = "";
  return every(2, async () => {
    const { runs, standings } = await ask(`api/compare?${runsQuery(names)}`);
    const headers = runs.map(({ header }) => header);
    const now = JSON.stringify([headers.map(({ events, status }) => [events, status]), standings]);
    if (now === shape) return;
    shape = now;
    grid.draw(compareCharts(runs));
    const lead = standings.length ? standingsTable(standings) : "";
    tables.replaceChildren(runsTable(headers), lead);
  });
}
