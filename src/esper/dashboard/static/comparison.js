"use strict";
// A comparison of `esper compare`, for its page and for the report: arms with their intervals,
// differences paired by host seed, curves of loss against FLOPs, and all of it as tables.

const METRICS = {
  test_accuracy: {
    label: "test accuracy",
    seeds: "accuracies",
    value: percent,
    tick: tickOf.get(percent),
    difference: (value) => `${points(value)} points`,
    differenceTick: (value) => number(Number((100 * value).toPrecision(6))),
  },
  test_loss: {
    label: "test loss",
    seeds: "losses",
    value: number,
    tick: number,
    difference: (value) => (value > 0 ? `+${number(value)}` : number(value)),
    differenceTick: number,
  },
};

const toneOfArm = (data, name) => toneOf(data.arms.findIndex((arm) => arm.name === name));

// Returns the nodes of a comparison, and `draw`, which takes its data.
function comparisonPart(id) {
  const part = {
    data: null,
    metric: "test_accuracy",
    against: null,
    arms: new DotPlot("Arms", "A dot is a host seed; the large one is the mean, the bar its 95 % interval."),
    pairs: new DotPlot("Paired differences",
      "A dot is one host seed: the arm minus the other one, on the same host and order of data."),
    grid: new ChartGrid(`${id}-curves`),
    tables: el("div"),
  };
  const redraw = () => part.data && drawComparison(part);
  const choose = (name, options) => el("select", {
    id: `${id}-${name}`,
    onchange: (event) => {
      part[name] = event.target.value;
      redraw();
    },
  }, options);
  const metrics = Object.entries(METRICS).map(([name, { label }]) =>
    el("option", { value: name }, label));
  part.other = choose("against", []);
  part.form = el("form", { class: "choose", onsubmit: (event) => event.preventDefault() },
    el("label", { for: `${id}-metric` }, "shown"), choose("metric", metrics),
    el("label", { for: `${id}-against` }, "against"), part.other);
  part.waiting = el("p", { class: "quiet" });
  part.body = el("div", {}, part.form, part.arms.node, part.pairs.node, part.grid.node, part.tables);
  part.node = el("div", { class: "comparison" }, part.waiting, part.body);
  part.draw = (data) => {
    part.data = data;
    redraw();
  };
  return part;
}

function drawComparison(part) {
  const { data, body, waiting } = part;
  body.hidden = !data.arms.length;
  waiting.hidden = data.arms.length > 0;
  waiting.textContent = data.header.done
    ? `${plural(data.header.done, "arm")} played so far. Intervals and differences are shown when all are.`
    : "No arm has been played yet.";
  if (body.hidden) return;
  chooseOther(part);
  const metric = METRICS[part.metric];
  part.arms.draw({
    rows: data.arms.map((arm) => armRow(data, arm, part.metric)),
    ticks: metric.tick,
  });
  part.pairs.draw({ rows: pairRows(part), ticks: metric.differenceTick, zero: true });
  part.grid.draw([lossAgainstFlops(data)]);
  const hosts = data.hosts.length ? [hostsTable(data)] : [];
  part.tables.replaceChildren(armsTable(data), pairsTable(data), ...hosts);
}

// The arm that the others are held against: the one that most are, unless another is chosen.
function chooseOther(part) {
  const { arms, pairs } = part.data;
  const count = (name) => pairs.filter(([, other]) => other === name).length;
  const usual = arms.toSorted((a, b) => count(b.name) - count(a.name))[0].name;
  if (!arms.some(({ name }) => name === part.against)) part.against = usual;
  part.other.replaceChildren(...arms.map(({ name, label }) =>
    el("option", { value: name }, label)));
  part.other.value = part.against;
}

function armRow(data, arm, metric) {
  const { mean, low, high } = arm[metric];
  const { seeds, value } = METRICS[metric];
  const label = arm.rate === 1 ? arm.label : `${arm.label}, rate × ${number(arm.rate)}`;
  const tone = toneOfArm(data, arm.name);
  return { label, tone, values: arm[seeds], mean, low, high, word: value(mean) };
}

function pairRows({ data, against, metric }) {
  const other = data.arms.find(({ name }) => name === against);
  const { seeds, difference } = METRICS[metric];
  const reached = new Map(other.seeds.map((seed, index) => [seed, other[seeds][index]]));
  const rows = data.arms.filter(({ minus }) => minus[against]).map((arm) => {
    const { mean, low, high, verdict } = arm.minus[against][metric];
    const values = arm.seeds.map((seed, index) =>
      (reached.has(seed) ? arm[seeds][index] - reached.get(seed) : null));
    const word = `${difference(mean)}, ${verdict}`;
    return { label: arm.label, tone: toneOfArm(data, arm.name), values, mean, low, high, word };
  });
  return rows;
}

function lossAgainstFlops({ arms }) {
  const shown = arms.filter(({ curve }) => curve.flops?.length);
  const columns = shown.map(({ curve }) => [curve.flops, curve.held_out_loss]);
  const [x, ...lines] = columns.length > 1 ? uPlot.join(columns) : columns[0] ?? [[]];
  const series = shown.map((arm, index) => ({
    label: arm.label,
    y: lines[index],
    tone: toneOf(arms.indexOf(arm)),
    dash: DASHES[Math.floor(arms.indexOf(arm) / 8) % 4],
    spans: true,
    isReference: true,
  }));
  return {
    title: "Held-out loss against FLOPs, mean over host seeds",
    x,
    xLabel: "FLOPs",
    xFormat: short,
    format: number,
    series,
    isWide: true,
  };
}

// ---- as tables ----
const between = ({ low, high }, form) => (isKnown(low) ? ` (${form(low)} to ${form(high)})` : "");

function armsTable({ arms }) {
  const head = ["arm", "rate", "test accuracy", "test loss", "parameters", "FLOPs", "planted",
    "kept", "culled", "episodes before"];
  const rows = arms.map((arm) => [
    arm.label,
    number(arm.rate),
    `${percent(arm.test_accuracy.mean)}${between(arm.test_accuracy, exact)}`,
    `${number(arm.test_loss.mean)}${between(arm.test_loss, number)}`,
    whole(arm.final_params),
    short(arm.flops),
    number(arm.germinated),
    number(arm.fossilized),
    number(arm.culled),
    isKnown(arm.episodes) ? whole(arm.episodes) : "?",
  ]);
  return table("Arms: means over host seeds, 95 % intervals", head, rows, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

function pairsTable({ arms, pairs }) {
  const byName = new Map(arms.map((arm) => [arm.name, arm]));
  const head = ["arm", "minus", "points", "claim", "test loss", "claim by loss"];
  const rows = pairs.map(([name, other]) => {
    const { test_accuracy: accuracy, test_loss: loss } = byName.get(name).minus[other];
    return [
      byName.get(name).label,
      byName.get(other).label,
      `${points(accuracy.mean)}${between(accuracy, points)}`,
      accuracy.verdict,
      `${number(loss.mean)}${between(loss, number)}`,
      loss.verdict,
    ];
  });
  return table("Differences, paired by host seed", head, rows, [2, 4]);
}

function hostsTable({ hosts }) {
  const rows = hosts.map(({ seed, variation, drawn }) => [seed, variation, drawn]);
  return table("Hosts: what each host seed has drawn", ["host seed", "variation", "drawn"], rows, [0, 1]);
}

function comparisonFacts({ header, arms }) {
  return facts([
    ["arms", whole(header.done)],
    ["host seeds", arms.length ? whole(Math.max(...arms.map(({ seeds }) => seeds.length))) : null],
    ["best mean test accuracy", isKnown(header.best_accuracy) ? percent(header.best_accuracy) : null],
    ["parameters of that arm", isKnown(header.params) ? whole(header.params) : null],
  ]);
}
