"use strict";
// What came of a run, as the page and the report show it: facts, tables, configuration.

const badge = (status) =>
  el("span", { class: `badge ${status === "running" ? "live" : ""}` }, status);

function headline(header) {
  const isKnownLead = isKnown(header.over_twin);
  return facts([
    [
      header.kind === "ppo" ? "rounds" : "epochs",
      header.total ? `${header.done} of ${header.total}` : whole(header.done),
    ],
    [isKnown(header.best_accuracy) ? "best accuracy" : "best held-out", bestOf(header)],
    ["over twin, last round", isKnownLead ? `${points(header.over_twin)} points` : null],
    ["parameters", whole(header.params)],
    ["hosts", String(header.hosts.length)],
    ["events", whole(header.events)],
    ["not understood", header.unknown ? whole(header.unknown) : null],
  ]);
}

// ---- configuration ----
function configTable(config) {
  const settings = flat(config).filter(([, value]) => value !== null);
  const write = (value) => (Array.isArray(value) ? value.join(", ") : String(value));
  const rows = settings.map(([name, value]) => [name, write(value)]);
  return table("What the run was started with", ["setting", "value"], rows);
}

// Nested settings as [name, value], the names joined by dots.
function flat(settings, prefix = "") {
  return Object.entries(settings).flatMap(([name, value]) => {
    const isNested = value && typeof value === "object" && !Array.isArray(value);
    return isNested ? flat(value, `${prefix}${name}.`) : [[prefix + name, value]];
  });
}

// ---- the sections of what came out and what it cost, empty where there is nothing to show ----
const part = (id, title, records, draw) =>
  (records.length ? section(id, title, ...draw(records)) : "");

const findings = (id, { anomalies, results, worth }) => [
  part(`${id}-anomalies`, "Updates that do not look healthy", anomalies, (all) => [anomalyList(all)]),
  part(`${id}-results`, "Results", results, (all) => [resultsTable(all)]),
  part(`${id}-worth`, "Was it worth it?", worth, (all) => worthOf(all.at(-1))),
];

const costs = (id, { ledgers, spent }) => [
  part(`${id}-spent`, "What the run cost", spent, (all) => spentNodes(all, ledgers)),
  part(`${id}-ledger`, "Ledger", spent.length ? [] : ledgers, ledgerNodes),
];

function anomalyList(anomalies) {
  return el("ul", {}, anomalies.map(({ round, kind, value, limit, where }) =>
    el("li", {}, `round ${round}: ${kind} is ${number(value)}, limit ${number(limit)} ${where ?? ""}`)));
}

function resultsTable(results) {
  const head = ["policy", "seed", "test accuracy", "held-out accuracy", "parameters", "kept",
    "culled", "FLOPs", "seconds"];
  const rows = results.map((result) => [
    result.arm,
    result.seed,
    percent(result.test_accuracy),
    percent(result.validation_accuracy),
    whole(result.final_params),
    result.fossilized,
    result.culled,
    short(result.flops),
    number(result.seconds),
  ]);
  return table("Results on test examples", head, rows, [1, 2, 3, 4, 5, 6, 7, 8]);
}

function worthOf(report) {
  const lead = gain(report.gain, report.standard_error);
  const size = `Parameters: ${whole(report.params)}, ` +
    `${times(report.params / report.host_params)} the host's.`;
  const cost = report.host_flops
    ? ` FLOPs of an example: ${short(report.flops)}, ` +
      `${times(report.flops / report.host_flops)} the host's.`
    : "";
  const head = ["seed", "slot", "stage", `${report.measure} without it`, "gain of having it",
    "parameters", "FLOPs"];
  const rows = report.parts.map((part) => [
    seedOf(part),
    placeOf(part),
    part.stage,
    number(part.without),
    gain(part.gain, part.standard_error),
    whole(part.params),
    short(part.flops),
  ]);
  return [
    el("p", {}, `After epoch ${report.epoch}, held-out ${report.measure} on ` +
      `${whole(report.examples)} examples: ${number(report.whole)}. ` +
      `Without all that grew: ${number(report.without_all)}, a gain of ${lead}. ` +
      "This is what the network loses without what it has learnt to rely on; " +
      "whether growing was worth it, garden.control() says."),
    el("p", {}, size + cost),
    table("With each part switched off", head, rows, [3, 4, 5, 6]),
  ];
}

// The phases of all episodes together, and host by host where there are several. Of a host whose
// ledger was closed again the newest counts.
function ledgerNodes(ledgers) {
  const newest = [...new Map(ledgers.map((ledger) => [ledger.host, ledger])).values()];
  const rowsOf = ({ host, flops, examples, seconds }) => Object.keys(seconds ?? {}).map((phase) =>
    [host, phase, short(flops?.[phase]), whole(examples?.[phase]), number(seconds[phase])]);
  const head = ["host", "phase", "FLOPs", "examples", "seconds"];
  const hosts = table("What each host's newest episode cost", head, newest.flatMap(rowsOf), [2, 3, 4]);
  if (newest.length < 2) return [hosts];
  const phases = [...new Set(newest.flatMap(({ seconds }) => Object.keys(seconds ?? {})))];
  const sum = (name, phase) =>
    newest.reduce((all, ledger) => all + (ledger[name]?.[phase] ?? 0), 0);
  const rows = phases.map((phase) => [
    phase,
    short(sum("flops", phase)),
    whole(sum("examples", phase)),
    number(sum("seconds", phase)),
  ]);
  return [
    table(`Newest episodes of ${newest.length} hosts together`, head.slice(1), rows, [1, 2, 3]),
    folded("Host by host", hosts),
  ];
}

// Twins once, and episodes and learning up to now; their phases for those who want them.
function spentNodes(spent, ledgers) {
  const all = spent.reduce((sum, { flops }) => sum + flops, 0);
  const share = (flops) => percent(all ? flops / all : null);
  const total = (what, name) =>
    spent.reduce((sum, cost) => (cost.what === what ? sum + cost[name] : sum), 0);
  const rows = [...new Set(spent.map(({ what }) => what))].map((what) => [
    what,
    short(total(what, "flops")),
    share(total(what, "flops")),
    whole(total(what, "examples")),
    number(total(what, "seconds")),
  ]);
  const phases = spent.map(({ what, phase, flops, examples, seconds }) =>
    [what, phase, short(flops), share(flops), whole(examples), number(seconds)]);
  const head = ["spent on", "FLOPs", "share", "examples", "seconds"];
  return [
    table("What the run spent so far", head, rows, [1, 2, 3, 4]),
    folded("Phase by phase",
      table("Phases", head.toSpliced(1, 0, "phase"), phases, [2, 3, 4, 5])),
    ledgers.length ? folded("Ledger of each host", ...ledgerNodes(ledgers)) : "",
  ];
}

function actionsTable(actions) {
  const head = ["host", "epoch", "op", "slot", "blueprint", "blend", "outcome"];
  const rows = actions.map((action) => [
    action.host,
    action.epoch,
    action.op,
    placeOf(action),
    action.blueprint ?? "–",
    action.blend ?? "–",
    action.refused ? `refused: ${action.refused}` : "done",
  ]);
  return table("The last action of each host; WAIT is none", head, rows, [1]);
}

// ---- runs and policies side by side ----
function runsTable(headers) {
  const head = ["run", "status", "task", "policy", "progress", "best held-out",
    "parameters"];
  const rows = headers.map((header) => [
    header.name,
    header.status,
    header.task,
    header.policy,
    progressOf(header),
    bestOf(header),
    whole(header.params),
  ]);
  return table("All runs", head, rows, [4, 5, 6]);
}

function standingsTable(standings) {
  const interval = ({ low, high }, form) =>
    (isKnown(low) ? ` (${form(low)} to ${form(high)})` : "");
  const lead = ({ gain, control }) =>
    (gain ? `${points(gain.mean)}${interval(gain, points)} over ${control}` : "–");
  const head = ["policy", "task", "epochs", "episodes", "accuracy in %", "over its control",
    "parameters"];
  const rows = standings.map((row) => [
    row.policy,
    row.task,
    whole(row.epochs),
    row.accuracy.count,
    `${exact(row.accuracy.mean)}${interval(row.accuracy, exact)} ${row.measure}`,
    lead(row),
    whole(row.params),
  ]);
  return table("Policies and controls: means and 95 % intervals", head, rows, [2, 3, 4, 5, 6]);
}

function gateDecisions(episodes) {
  const verdictsOf = ({ host, spans }) => spans.flatMap((span) =>
    span.verdicts.map((verdict) => ({ ...verdict, span, host })));
  const judged = episodes.flatMap(verdictsOf);
  const ruleOf = ({ gate, needed }) => `${gate} ${GATES[gate] ?? ""}: ${needed}`;
  const rules = [...new Set(judged.map(ruleOf))].sort();
  const head = ["host", "epoch", "slot", "seed", "gate", "verdict", "measured", "evidence"];
  const rows = judged.map((verdict) => [
    verdict.host,
    verdict.epoch,
    placeOf(verdict.span),
    seedOf(verdict.span),
    verdict.gate,
    verdictOf(verdict),
    number(verdict.measured),
    verdict.reason,
  ]);
  return [
    el("ul", { class: "quiet" }, rules.map((text) => el("li", {}, text))),
    table("Every verdict that was new", head, rows, [1, 6]),
  ];
}
