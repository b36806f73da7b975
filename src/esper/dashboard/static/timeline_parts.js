"use strict";
// The shapes of a timeline: axis, strip of accuracy, lanes, seeds and their key. Each function gets
// the timeline and reads its measures; `u` is the font's scale.

const STRIPS = { accuracy: "accuracy", held_out_loss: "loss", score: "score" };

// ---- behind the seeds ----
function drawAxis(timeline) {
  const { u, last, left, right, top, now, episode } = timeline;
  const most = Math.max(2, (right - left) / (64 * u));
  const ticks = roundTicks(0, last, Math.min(last, most));
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
  const drawStratum = (span, index) => {
    const top = y + (10 + STRATUM * index) * u;
    const end = timeline.x(span.removed ?? now);
    const stratum = svg("rect", {
      class: isRemoved(span) ? "stratum removed" : "stratum",
      x: timeline.x(span.end),
      y: top,
      width: Math.max(1, end - timeline.x(span.end)),
      height: 3 * u,
    });
    const cut = svg("path", { class: "cut", d: `M${end} ${top - 3 * u}v${9 * u}` });
    return isRemoved(span) ? [stratum, cut] : [stratum];
  };
  const name = svg("text", { x: 0, y: y + 4 * u, class: "lane" },
    svg("title", {}, `${timeline.nameOfLane(slot)}, slot ${slot}`),
    endOf(timeline.nameOfLane(slot), letters));
  return [
    name,
    svg("path", { d: `M${left} ${y}H${right}`, class: "rule" }),
    ...kept.slice(0, MOST_STRATA).flatMap(drawStratum),
    kept.length ? timeline.text(timeline.x(now) + 6 * u, y + 17 * u, `${count} kept`, "tick") : "",
  ];
}

// What is measured of the host and of its twin, above the lanes. The axis holds what the curves are
// in the last two thirds of the epochs, where they have parted, unless all of it is asked for.
function drawStrip(timeline) {
  const { u, left, right, strip } = timeline;
  if (!strip) return [];
  const { epoch, grown, twin, format } = strip;
  const parted = Math.floor(epoch.length / 3);
  const later = [...grown.slice(parted), ...twin.slice(parted)].filter(isKnown);
  const all = [...grown, ...twin].filter(isKnown);
  const values = timeline.isWhole || !later.length ? all : later;
  const low = Math.min(...values);
  const high = Math.max(...values);
  timeline.hasMore = later.length > 0
    && (Math.min(...all) < Math.min(...later) || Math.max(...all) > Math.max(...later));
  const top = 14 * u;
  const base = timeline.top - 16 * u;
  const y = (value) => base - ((value - low) / (high - low || 1)) * (base - top);
  const pointOf = (value, row) => `${timeline.x(epoch[row]).toFixed(1)} ${y(value).toFixed(1)}`;
  const path = (column) => column.reduce((d, value, row) =>
    (isKnown(value) ? `${d}${d ? "L" : "M"}${pointOf(value, row)}` : d), "");
  const ends = [["grown", lastOf(grown)], ["twin", lastOf(twin)]]
    .filter(([, value]) => isKnown(value));
  const heights = keepApart(ends.map(([, value]) => y(value)), top, base, u);
  const x = timeline.x(timeline.now) + 6 * u;
  const window = svg("rect", { x: 0, y: top - 3, width: timeline.width, height: base - top + 6 });
  return [
    timeline.text(0, top, format(high), "tick"),
    timeline.text(0, base, format(low), "tick"),
    svg("path", { d: `M${left} ${base + 4}H${right}`, class: "rule" }),
    svg("clipPath", { id: timeline.clip }, window),
    svg("g", { "clip-path": `url(#${timeline.clip})` },
      svg("path", { d: path(twin), class: "curve twin" }),
      svg("path", { d: path(grown), class: "curve grown" })),
    ...ends.flatMap(([name, value], index) => [
      timeline.text(x, heights[index], name, `end ${name}`),
      timeline.text(x, heights[index] + 12 * u, format(value), "tick"),
    ]),
  ];
}

// What the strip shows: accuracy, or else what a loop of one's own measures instead.
function stripOf({ epoch = [], ...columns }) {
  const shown = [["accuracy", percent], ["held_out_loss", number], ["score", number]]
    .find(([name]) => columns[name]?.some(isKnown));
  if (!shown) return null;
  const [name, format] = shown;
  const twin = name === "accuracy" ? columns.twin_accuracy ?? [] : [];
  return { epoch, grown: columns[name], twin, format, name: STRIPS[name] };
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
  const fate = fateNow(span);
  const left = (from + room - to) / u - 11;
  const words = isRemoved(span) ? [`removed at ${span.removed}`, "removed"] : [fate?.word ?? ""];
  const word = words.find((text) => text.length * LETTER < left) ?? "";
  const reach = Math.max(
    to + (word ? 11 + word.length * LETTER : 8) * u - from,
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
  if (word) shapes.push(timeline.text(to + 11 * u, middle + 4 * u, word, "seed-name"));
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

// The stages of a seed that lasted, so that they have a bar.
function stagesSeen({ stages, end }) {
  const shown = stages.filter(([stage]) => STAGES[stage]);
  return shown.filter(([, epoch], index) => (shown[index + 1]?.[1] ?? end ?? Infinity) > epoch)
    .map(([stage]) => stage);
}

function stageBar(box, stage) {
  const shape = svg("rect", { ...box, class: `stage ${STAGES[stage].tone}` });
  return stage === "BLENDING" ? [shape, svg("rect", { ...box, fill: "url(#hatch)" })] : [shape];
}

// ---- the key ----
// Only what occurs in the episode; what the curves above the lanes are stands in front.
function stageKey({ episode: { spans, rollbacks }, strip }) {
  const size = { width: 18, height: 10 };
  const bar = (...shapes) => swatch("0 0 18 10", ...shapes);
  const mark = ({ shape, tone }) =>
    swatch("-9 -8 18 16", svg("path", { d: shape, class: `mark ${tone}` }));
  const line = (kind) => bar(svg("path", { d: "M0 5H18", class: `curve ${kind}` }));
  const seen = new Set(spans.flatMap(stagesSeen));
  const stages = Object.entries(STAGES).filter(([stage]) => seen.has(stage));
  const fates = Object.values(FATES).filter((fate) => spans.some((span) => fateNow(span) === fate));
  const entries = [
    strip ? [line("grown"), `held-out ${strip.name}`] : null,
    strip?.twin.some(isKnown) ? [line("twin"), "its twin, left alone"] : null,
    ...stages.map(([stage, { label }]) => [bar(...stageBar(size, stage)), label]),
    ...fates.map((fate) => [mark(fate), fate.word]),
    spans.some(({ fate }) => fate === "FOSSILIZED")
      ? [bar(svg("rect", { ...size, class: "stratum" })), "fossil, part of the host from then on"]
      : null,
    rollbacks.length ? [line("rollback"), "rolled back"] : null,
  ];
  return entries.filter(isKnown).map((entry) => el("li", {}, entry));
}
