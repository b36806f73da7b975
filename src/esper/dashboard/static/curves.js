"use strict";
// Which curves there are: of an episode, across rounds, and of runs side by side.

const LEFT_ALONE = DASHES[1]; // how the line of what did not grow, or was trained on, is dashed
const REFERENCE = { tone: "--muted", dash: LEFT_ALONE, isReference: true };

// The columns whose names begin with a prefix, as lines. A part of one slot, as contribution:r0c0,
// is called by its module.
function named(columns, prefix, modules = {}) {
  const names = Object.keys(columns).filter((name) => name.startsWith(prefix));
  return names.map((name) => {
    const [what, slot] = name.slice(prefix.length).split(":");
    const words = what.replaceAll("_", " ").toLowerCase();
    return { label: slot ? `${words} ${modules[slot] ?? slot}` : words, y: columns[name] };
  });
}

const grownAndTwin = (columns) => [
  { label: "grown", y: columns.accuracy, tone: "--kept", dash: [] },
  { label: "twin, left alone", y: columns.twin_accuracy, ...REFERENCE },
];

// ---- one episode ----
function episodeCharts(episode, modules) {
  const epochs = episode.epochs;
  const chart = (title, series, more) =>
    ({ x: epochs.epoch ?? [], xLabel: "epoch", format: number, title, series, ...more });
  return [
    chart("Held-out accuracy", grownAndTwin(epochs), { format: percent }),
    chart("Loss", [
      { label: "held-out", y: epochs.held_out_loss, tone: "--kept" },
      { label: "training", y: epochs.train_loss, tone: "--muted", dash: LEFT_ALONE },
    ]),
    chart("Held-out score", [{ label: "mean, higher is better", y: epochs.score, tone: "--kept" }]),
    chart("Parameters", [{ label: "host and seeds", y: epochs.params }],
      { format: whole, ticks: short }),
    chart("FLOPs since birth", [{ label: "all phases", y: epochs.flops }], { format: short }),
    chart("Steps of an epoch", [{ label: "steps", y: epochs.steps }],
      { format: whole }),
    chart("Share of the episode used", [{ label: "epochs, or compute", y: epochs.share }],
      { format: percent }),
    chart("Alpha per slot", [], { ...slotLines(episode, "alpha", false), range: [0, 1.05] }),
    chart("Contribution ± standard error", [],
      slotLines(episode, "contribution", true)),
    chart("Reward and its parts", [
      { label: "reward", y: epochs.reward, tone: "--ink" },
      ...named(epochs, "part.", modules),
    ]),
  ];
}

// One line per slot. Between two seeds of a slot its line has a gap (null); a reading that was
// thinned out does not break it (undefined).
function slotLines(episode, column, hasErrors) {
  const measured = episode.spans.filter(({ readings }) => readings.epoch?.length);
  const seeds = measured.map((span) => readingsFromBirth(span, column));
  const x = [...new Set(seeds.flatMap(({ epochs }) => epochs))].sort((a, b) => a - b);
  const rowOf = new Map(x.map((epoch, row) => [epoch, row]));
  const slots = [...new Set(seeds.map(({ slot }) => slot))].sort();
  const series = slots.map((slot) => {
    const line = { label: slot, y: Array(x.length).fill(null) };
    if (hasErrors) Object.assign(line, { lo: [...line.y], hi: [...line.y] });
    for (const seed of seeds) {
      if (seed.slot === slot) drawSeed(line, seed, rowOf);
    }
    return line;
  });
  return { x, series };
}

// A seed's readings, with one of its birth before them where none was made then.
function readingsFromBirth({ readings, ...span }, column) {
  const birth = startOf(span);
  const isMeasured = readings.epoch[0] <= birth;
  const fromBirth = (first, later) => (isMeasured ? later : [first, ...later]);
  return {
    slot: placeOf(span),
    epochs: fromBirth(birth, readings.epoch),
    errors: fromBirth(0, readings.standard_error),
    values: fromBirth(null, readings[column]),
  };
}

function drawSeed(line, { epochs, values, errors }, rowOf) {
  line.y.fill(undefined, rowOf.get(epochs[0]) + 1, rowOf.get(epochs.at(-1)));
  epochs.forEach((epoch, reading) => {
    const row = rowOf.get(epoch);
    line.y[row] = values[reading] ?? line.y[row] ?? null;
    if (!line.lo || !isKnown(values[reading])) return;
    line.lo[row] = values[reading] - (errors[reading] ?? 0);
    line.hi[row] = values[reading] + (errors[reading] ?? 0);
  });
}

// ---- across rounds ----
function roundCharts(rounds, modules) {
  const chart = (title, series, format = number) =>
    ({ x: rounds.round ?? [], xLabel: "round", format, title, series });
  return [
    chart("Return", [{ label: "mean over hosts", y: rounds.mean_return }]),
    chart("Accuracy at the end", grownAndTwin(rounds), percent),
    chart("Parameters at the end",
      [{ label: "of the host's", y: rounds.params_share }], times),
    chart("Explained variance", [{ label: "of returns", y: rounds.explained_variance }]),
    chart("Reward parts per episode", named(rounds, "part.", modules)),
    chart("What the policy does", opShares(rounds), percent),
    chart("Policy step", [
      { label: "KL", y: rounds.kl },
      { label: "clipped share", y: rounds.clip_fraction },
    ]),
    chart("Entropy per head", named(rounds, "entropy.")),
    chart("Losses of the update", [
      { label: "value", y: rounds.value_loss },
      { label: "policy", y: rounds.policy_loss },
    ]),
    chart("First minibatch's ratio gap", [{ label: "distance from 1", y: rounds.first_ratio_gap }]),
  ];
}

function opShares(rounds) {
  const ops = named(rounds, "op.");
  const decisions = (row) => ops.reduce((sum, { y }) => sum + (y[row] ?? 0), 0);
  const total = (rounds.round ?? []).map((_, row) => decisions(row));
  return ops.map(({ label, y }) => ({
    label,
    y: y.map((count, row) => (total[row] ? count / total[row] : null)),
  }));
}

// ---- runs side by side ----
function compareCharts(runs) {
  const overlay = (kind, title, column, more) => overlayRuns(runs, kind, title, column, more);
  return [
    overlay("run", "Held-out accuracy, mean over hosts", "accuracy", { format: percent }),
    overlay("run", "Held-out loss, mean over hosts", "held_out_loss", { format: number }),
    overlay("run", "Held-out score, mean over hosts", "score", { format: number }),
    overlay("run", "Parameters, mean over hosts", "params", { format: whole, ticks: short }),
    overlay("ppo", "Accuracy at the end of the episode", "accuracy", { format: percent }),
    overlay("ppo", "Return", "mean_return", { format: number }),
    overlay("ppo", "Parameters of the host's", "params_share", { format: times }),
  ].flat();
}

// One chart with a line for each run that has the column, or none. A run has the same tone in all.
function overlayRuns(runs, kind, title, column, { format, ticks }) {
  const isShown = ({ header, curves }) => header.kind === kind && curves[column]?.some(isKnown);
  const shown = runs.filter(isShown);
  if (!shown.length) return [];
  const xLabel = kind === "ppo" ? "round" : "epoch";
  const columns = shown.map(({ curves }) => [curves[xLabel], curves[column]]);
  const [x, ...lines] = columns.length === 1 ? columns[0] : uPlot.join(columns);
  const numberOf = new Map(runs.map(({ header }, index) => [header.name, index]));
  const series = shown.map(({ header }, index) => {
    const run = numberOf.get(header.name);
    const look = { spans: true, isReference: true, tone: toneOf(run), dash: DASHES[run % 4] };
    return { label: header.name, y: lines[index], ...look };
  });
  return [{ title, x, xLabel, format, ticks, series, isLarge: true }];
}
