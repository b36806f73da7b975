"use strict";
// The report: everything of some runs and comparisons on one page that asks no server.

const SPREAD = "Spread is the standard deviation over episodes. The difference is paired: " +
  "by host seed with the run that never grows, or each episode with its twin.";

function reportPage(main, report) {
  const headers = report.runs.map(({ header }) => header);
  const names = [...report.comparisons.map(({ header }) => header), ...headers].map(({ name }) => name);
  const title = names.length === 1 ? names[0] : names.join(", ");
  document.documentElement.classList.add("paper");
  document.title = `esper report: ${names.join(", ")}`;
  main.append(
    el("h1", {}, title),
    el("p", { class: "quiet" }, `Report of esper ${report.version}, written on ${report.date}.`));
  report.comparisons.forEach((comparison, index) => reportComparison(main, comparison, index));
  if (report.standings.length) {
    const note = el("p", { class: "quiet" }, SPREAD);
    main.append(section("standings", "Final table", standingsTable(report.standings), note));
  }
  if (headers.length > 1) {
    const grid = new ChartGrid("compare");
    main.append(section("curves", "Runs side by side", runsTable(headers), grid.node));
    grid.draw(compareCharts(report.runs));
  }
  report.runs.forEach((run, index) => reportRun(main, run, index));
}

function reportComparison(main, data, index) {
  const { header } = data;
  const part = comparisonPart(`comparison-${index}`);
  const id = (name) => `comparison-${index}-${name}`;
  main.append(el("article", { "aria-label": header.name },
    el("h2", { class: "run-name" }, header.name, " ", badge(header.status)),
    el("p", { class: "quiet" }, subtitle(header)),
    comparisonFacts(data),
    part.node,
    section(id("config"), "Configuration", configTable(data.config)),
    againSection(id("again"), data)));
  part.draw(data);
}

function againSection(id, { advice, command }) {
  return section(id, "How to reproduce",
    el("p", {}, advice),
    el("pre", { tabindex: 0 }, el("code", {}, command.join("\n"))));
}

// Sections first, drawings after: a drawing has to know how wide it is on the page.
function reportRun(main, run, index) {
  const { header, episodes, rest } = run;
  const isTaught = header.kind === "ppo";
  const id = (part) => `run-${index}-${part}`;
  const ofEpisode = new ChartGrid(id("episode"));
  const ofRounds = new ChartGrid(id("rounds"));
  const drawings = episodes.map((episode) => ({ episode, part: growthPart() }));
  const article = el("article", { "aria-label": header.name },
    el("h2", { class: "run-name" }, header.name, " ", badge(header.status)),
    el("p", { class: "quiet" }, subtitle(header)),
    headline(header));
  const add = (part, title, ...nodes) => article.append(section(id(part), title, ...nodes));
  main.append(article);
  if (isTaught && run.rounds.round?.length) add("rounds", "Curves across rounds", ofRounds.node);
  if (episodes.length) {
    const title = isTaught ? `Growth in round ${episodes[0].round}` : "Growth";
    add("growth", title, ...growthNodes(drawings, run.episodes_left_out));
    add("episode", `Curves of host ${episodes[0].host}`, ofEpisode.node);
  }
  article.append(...findings(`run-${index}`, rest), ...costs(`run-${index}`, rest));
  if (episodes.length) add("gates", "Gate decisions", ...gateDecisions(episodes));
  add("config", "Configuration", configTable(rest.config));
  article.append(againSection(id("again"), run));

  for (const { episode, part } of drawings) part.draw(episode, header);
  if (isTaught) ofRounds.draw(roundCharts(run.rounds, header.modules));
  if (episodes.length) ofEpisode.draw(episodeCharts(episodes[0], header.modules));
}

function growthNodes(drawings, leftOut) {
  const nodes = drawings.flatMap(({ episode, part }) =>
    [el("h3", {}, `Host ${episode.host}`), part.node]);
  if (!leftOut) return nodes;
  return [...nodes, el("p", { class: "quiet" },
    `${plural(leftOut, "more host")} of this run not drawn.`)];
}
