"use strict";
// The growth of one episode: its timeline, what the gates saw of the chosen seed, and a table.

function growthPart() {
  const panel = el("aside",
    { class: "evidence", "aria-label": "Gate evidence", "aria-live": "polite", tabindex: 0 },
    el("p", { class: "quiet" },
      "Point at a seed, or move to it with the keyboard, to see what its gates saw."));
  const timeline = new Timeline((span, now) => showEvidence(panel, span, now));
  const summary = el("p", { class: "quiet" });
  const details = el("details", { ontoggle: () => details.open && showTable() },
    el("summary", {}, "The same as a table"),
    el("div"));
  const showTable = () => details.lastChild.replaceChildren(seedsTable(timeline.episode));
  const draw = (episode, header) => {
    summary.textContent = episodeWords(episode);
    timeline.draw(episode, header);
    if (details.open) showTable();
  };
  const drawing = el("div", { class: "growth" }, timeline.node, panel);
  return { draw, node: el("div", { class: "growth-part" }, summary, drawing, details) };
}

function showEvidence(panel, span, now) {
  panel.replaceChildren(
    el("h3", {}, `${seedOf(span)} in ${placeOf(span)}`),
    el("p", {}, fateOf(span, now)),
    facts([
      ["contribution", gain(span.contribution, span.standard_error)],
      ["alpha", number(span.alpha)],
      ["parameters", whole(span.params)],
      ["age", plural(span.age, "epoch")],
    ]),
    el("ol", { class: "gates" }, span.verdicts.map(gateLine)));
}

function gateLine(judged) {
  return el("li", {},
    el("b", {}, `${judged.gate} ${verdictOf(judged)}`),
    ` at epoch ${judged.epoch}: ${GATES[judged.gate] ?? "gate"}`,
    el("br"),
    `${judged.reason}. Needed: ${judged.needed}.`);
}

function seedsTable(episode) {
  const head = ["seed", "slot", "planted", "end", "fate", "contribution", "parameters"];
  const rows = episode.spans.map((span) => [
    seedOf(span),
    placeOf(span),
    startOf(span),
    span.end ?? "–",
    wordOf(span),
    gain(span.contribution, span.standard_error),
    whole(span.params),
  ]);
  return table(`Seeds of host ${episode.host}`, head, rows, [2, 3, 6]);
}
