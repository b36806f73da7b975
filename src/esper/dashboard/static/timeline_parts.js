"use strict";
// The shapes of a timeline: axis, strip of accuracy, lanes, seeds and their key. Each function gets
// the timeline and reads its measures; `u` is the font's scale.

// ---- behind the seeds ----
function drawAxis(timeline) {
  const { u, last, left, right, top, now, episode } = timeline;
  const wanted = last / Math.max(2, (right - left) / (64 * u));
  const scale = 10 ** Math.floor(Math.log10(Math.max(1, wanted)));
  const step = [1, 2, 5, 10].map((n) => n * scale).find((n) => n >= wanted);
  const ticks = Array.from({ length: Math.floor(last / step) + 1 }, (_, index) => index * step);
  const y = timeline.bottom + 8 * u;
  const drawTick = (tick) => [
    svg("path", { d: `M${timeline.x(tick)} 8V${y + 5}`, class: "rule" }),
    timeline.text(timeline.x(tick), y + 18 * u, String(tick), "tick", "middle"),
  ];
  const drawRollback = ({ epoch }) => [
    svg("path", { d: `M${timeline.x(epoch)} 8V${y}`, class: "rollback" }),
    timeline.text(timeline.x(epoch) + 3, 14 * u, "↺ rolled back", "tick"),
  ];
  const shapes = [
    svg("path", { d: `M${left} ${y}H${right}`, class: "rule" }),
    ...ticks.flatMap(drawTick),
    timeline.text(right + 15 * u, y + 18 * u, "epoch", "tick"),
    ...episode.rollbacks.flatMap(drawRollback),
  ];
  if (now < last) {
    shapes.push(svg("path", { d: `M${timeline.x(now)} ${top - 12 * u}V${y}`, class: "now" }));
  }
  return shapes;
}

function drawLanes(timeline) {
  return timeline.slots.flatMap((slot) => drawLane(timeline, slot));
}

function drawLane(timeline, slot) {
  const { u, left, right, now, letters } = timeline;
  const y = timeline.tops[slot] + 26 * u;
  const kept = timeline.kept(slot);
  const count = kept.filter((span) => !isRemoved(span)).length;
  const drawStratum = (span, index) => svg("rect", {
    class: "stratum",
    x: timeline.x(span.end),
    y: y + (10 + STRATUM * index) * u,
    width: Math.max(1, timeline.x(span.removed ?? now) - timeline.x(span.end)),
    height: 3 * u,
  });
  return [
    timeline.text(0, y + 4 * u, slot, "lane"),
    timeline.text(0, y + 17 * u, endOf(timeline.names[slot] ?? "", letters), "tick"),
    svg("path", { d: `M${left} ${y}H${right}`, class: "rule" }),
    ...kept.slice(0, MOST_STRATA).map(drawStratum),
    kept.length ? timeline.text(timeline.x(now) + 6 * u, y + 17 * u, `${count} kept`, "tick") : "",
  ];
}

// The accuracy of the host and of its twin, above the lanes.
function drawStrip(timeline) {
  const { u, left, right } = timeline;
  const { epoch = [], accuracy = [], twin_accuracy: twin = [] } = timeline.episode.epochs;
  const values = [...accuracy, ...twin].filter(isKnown);
  if (!values.length) return [];
  const low = Math.min(...values);
  const high = Math.max(...values);
  const top = 14 * u;
  const base = timeline.top - 16 * u;
  const y = (value) => base - ((value - low) / (high - low || 1)) * (base - top);
  const pointOf = (value, row) => `${timeline.x(epoch[row]).toFixed(1)} ${y(value).toFixed(1)}`;
  const path = (column) => column.reduce((d, value, row) =>
    (isKnown(value) ? `${d}${d ? "L" : "M"}${pointOf(value, row)}` : d), "");
  const ends = [["grown", lastOf(accuracy)], ["twin", lastOf(twin)]]
    .filter(([, value]) => isKnown(value));
  const heights = keepApart(ends.map(([, value]) => y(value)), top, base, u);
  const x = timeline.x(timeline.now) + 6 * u;
  return [
    timeline.text(0, top, percent(high), "tick"),
    timeline.text(0, base, percent(low), "tick"),
    svg("path", { d: `M${left} ${base + 4}H${right}`, class: "rule" }),
    svg("path", { d: path(twin), class: "curve twin" }),
    svg("path", { d: path(accuracy), class: "curve grown" }),
    ...ends.flatMap(([name, value], index) => [
      timeline.text(x, heights[index], name, `end ${name}`),
      timeline.text(x, heights[index] + 12 * u, percent(value), "tick"),
    ]),
  ];
}

// The heights of two labels, moved so far that one can read both.
function keepApart(heights, top, base, u) {
  const [grown, twin] = heights;
  if (heights.length < 2 || Math.abs(grown - twin) >= 26 * u) return heights;
  const middle = Math.min(Math.max((grown + twin) / 2, top + 13 * u), base - 13 * u);
  const side = grown <= twin ? -13 : 13;
  return [middle + side * u, middle - side * u];
}

// ---- seeds ----
function seedParts(timeline, span) {
  const { u } = timeline;
  const top = timeline.tops[span.slot];
  const bar = { y: top + 18 * u, height: 16 * u };
  const from = timeline.x(startOf(span));
  const to = Math.max(timeline.x(span.end ?? timeline.now), from + 4 * u);
  const room = roomFor(timeline, span);
  const label = seedOf(span);
  const letters = Math.floor((room - 4 * u) / (LETTER * u));
  const fate = FATES[span.fate];
  const hasWord = fate && from + room - to > 48 * u;
  const reach = Math.max(
    to + (hasWord ? 46 : 8) * u - from,
    Math.min(label.length, letters) * LETTER * u,
  );
  const shapes = [
    svg("rect", {
      class: "ring",
      x: from - 3 * u,
      y: bar.y - 3 * u,
      width: to - from + 6 * u,
      height: bar.height + 6 * u,
      rx: 4 * u,
    }),
    svg("rect", { class: "hit", x: from, y: top, width: reach, height: 38 * u }),
    ...stageBars(timeline, span, bar, to),
  ];
  if (letters >= 3) {
    const shown = label.length > letters ? `${label.slice(0, letters - 1)}…` : label;
    shapes.push(timeline.text(from, top + 13 * u, shown, "seed-name"));
  }
  if (!fate) return shapes;
  const middle = bar.y + bar.height / 2;
  shapes.push(svg("path", {
    d: fate.shape,
    class: `mark ${fate.tone}`,
    transform: `translate(${to} ${middle}) scale(${u})`,
  }));
  if (hasWord) shapes.push(timeline.text(to + 11 * u, middle + 4 * u, fate.word, "seed-name"));
  return shapes;
}

// The width that a seed has for itself: to the next one in its slot, or to the end of the lane.
function roomFor(timeline, span) {
  const inSlot = timeline.episode.spans.filter(({ slot }) => slot === span.slot);
  const later = inSlot.map(startOf).filter((start) => start > startOf(span));
  const from = timeline.x(startOf(span));
  if (later.length) return timeline.x(Math.min(...later)) - from;
  return timeline.x(timeline.last) + 50 * timeline.u - from;
}

function stageBars(timeline, span, bar, to) {
  const stages = span.stages.filter(([stage]) => STAGES[stage]);
  return stages.flatMap(([stage, epoch], index) => {
    const x = timeline.x(epoch);
    const end = index + 1 < stages.length ? timeline.x(stages[index + 1][1]) : to;
    if (end <= x) return [];
    return stageBar({ x, y: bar.y, width: end - x, height: bar.height }, stage);
  });
}

function stageBar(box, stage) {
  const shape = svg("rect", { ...box, class: `stage ${STAGES[stage].tone}` });
  return stage === "BLENDING" ? [shape, svg("rect", { ...box, fill: "url(#hatch)" })] : [shape];
}

// ---- the key ----
function stageKey() {
  const size = { width: 18, height: 10 };
  const bar = (...shapes) => swatch("0 0 18 10", ...shapes);
  const mark = ({ shape, tone }) =>
    swatch("-9 -8 18 16", svg("path", { d: shape, class: `mark ${tone}` }));
  const stages = Object.entries(STAGES).map(([stage, { label }]) =>
    el("li", {}, bar(...stageBar(size, stage)), label));
  const fates = Object.values(FATES).map((fate) => el("li", {}, mark(fate), fate.word));
  const fossil = bar(svg("rect", { ...size, class: "stage kept" }));
  return el("ul", { class: "legend", "aria-label": "Key" },
    stages,
    fates,
    el("li", {}, fossil, "fossil, part of the host from then on"));
}
