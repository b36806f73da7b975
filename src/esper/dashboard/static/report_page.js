"use strict";
// The report: everything of some runs on one page that asks no server.

const SPREAD = "Spread is the standard deviation over episodes. The difference is paired: " +
  "by host seed with the run that never grows, or each episode with its twin.";

function reportPage(main, report) {
  const headers = report.runs.map(({ header }) => header);
  const title = headers.length === 1 ? headers[0].name : `${headers.length} runs`;
  document.documentElement.classList.add("paper");
  document.title = `esper report: ${headers.map(({ name }) => name).join(", ")}`;
  main.append(
    el("h1", {}, title),
    el("p", { class: "quiet" }, `Report of esper ${report.version}, written on ${report.date}.`));
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
  article.append(...outcome(`run-${index}`, rest));
  if (episodes.length) add("gates", "Gate decisions", ...gateDecisions(episodes));
  add("config", "Configuration", configTable(rest.config));
  add("again", "How to reproduce",
    el("p", {}, run.advice),
    el("pre", { tabindex: 0 }, el("code", {}, run.command.join("\n"))));

  for (const { episode, part } of drawings) part.draw(episode, header.slots, header.epochs);
  if (isTaught) ofRounds.draw(roundCharts(run.rounds));
  if (episodes.length) ofEpisode.draw(episodeCharts(episodes[0]));
}

function growthNodes(drawings, leftOut) {
  const nodes = drawings.flatMap(({ episode, part }) =>
    [el("h3", {}, `Host ${episode.host}`), part.node]);
  if (!leftOut) return nodes;
  return [...nodes, el("p", { class: "quiet" },
    `${plural(leftOut, "more host")} of this run not drawn.`)];
}
