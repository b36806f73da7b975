"use strict";
// Draws runs: live from /api, or in a report from the page's own data. Text from a run only ever becomes a text node.
(() => {
  // ---- nodes ----
  const SVG_SPACE = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG_SPACE, tag), attributes, children);

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }

  function table(caption, head, rows, numeric = []) {
    const kind = (index) => (numeric.includes(index) ? "number" : null);
    const cell = (value, index) => el(index ? "td" : "th", { class: kind(index), scope: index ? null : "row" }, value);
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      el("table", {}, el("caption", {}, caption),
        el("thead", {}, el("tr", {}, head.map((name, index) => el("th", { scope: "col", class: kind(index) }, name)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
  }

  const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

  const section = (id, title, ...children) =>
    el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);

  // ---- numbers and words ----
  const isKnown = (value) => value !== null && value !== undefined;
  const known = (format) => (value) => (isKnown(value) ? format(value) : "–");
  const percent = known((value) => `${(100 * value).toFixed(1)} %`);
  const exact = known((value) => (100 * value).toFixed(2));
  const points = known((value) => `${value < 0 ? "−" : "+"}${exact(Math.abs(value))}`);
  const whole = known((value) => Math.round(value).toLocaleString("en"));
  const short = known((value) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value));
  const times = known((value) => `${value.toFixed(2)} ×`);
  const number = known((value) => {
    const size = Math.abs(value);
    const text = size && (size < 1e-3 || size >= 1e5) ? size.toExponential(1) : Number(size.toPrecision(4)).toString();
    return value < 0 ? `−${text}` : text;
  });
  const gain = (mean, error) => (isKnown(mean) ? `${number(mean)}${isKnown(error) ? ` ± ${number(error)}` : ""}` : "not measured");
  const lastOf = (values) => values?.findLast(isKnown) ?? null;
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  const ago = known((seconds) => {
    const steps = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const [size, unit] = steps.find(([size]) => seconds >= size) ?? steps[3];
    return `${Math.floor(seconds / size)} ${unit} ago`;
  });

  const STAGES = {
    GERMINATED: { label: "germinated", tone: "germinated" },
    TRAINING: { label: "training", tone: "training" },
    BLENDING: { label: "blending", tone: "blending" },
    PROBATIONARY: { label: "probation", tone: "probation" },
  };
  const FATES = {
    FOSSILIZED: { word: "kept", tone: "kept", shape: "M0-7 7 0 0 7-7 0Z" },
    CULLED: { word: "culled", tone: "culled", shape: "M-5-5 5 5M-5 5 5-5" },
  };
  const VERDICTS = { passed: "✓ passed", failed: "✗ failed" };
  const GATES = {
    G0: "fits the slot", G1: "is in an optimiser", G2: "beats the host in its shadow", G3: "is blended in",
    G5: "has been measured", LATE: "pays when the rate has fallen",
  };
  const verdictOf = (judged) => VERDICTS[judged.verdict] ?? `– ${judged.verdict}`;
  const startOf = (span) => span.stages[0]?.[1] ?? 0;
  const placeOf = ({ slot, module }) => (module ? `${slot} (${module})` : slot);
  const endOf = (name, letters) => (name.length > letters ? `…${name.slice(1 - letters)}` : name);

  const isRemoved = (span) => isKnown(span.removed);
  const wordOf = (span) => (FATES[span.fate]?.word ?? "alive") + (isRemoved(span) ? `, removed at epoch ${span.removed}` : "");

  function fateOf(span, now) {
    const fate = FATES[span.fate];
    const stage = STAGES[span.stages.at(-1)?.[0]]?.label ?? "alive";
    return fate ? `epochs ${startOf(span)} to ${span.end}, ${wordOf(span)}` : `since epoch ${startOf(span)}, ${stage} at epoch ${now}`;
  }

  // ---- charts ----
  const toneOf = (index) => `--tone-${1 + (index % 8)}`;
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
  const charts = new Set();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const fontScale = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.onresized?.()));

  class Chart {
    constructor(title, group) {
      this.group = group;
      this.title = title;
      this.at = el("span", { class: "at" });
      this.legend = el("ul", { class: "legend" });
      this.box = el("div", { class: "plot", role: "img" });
      this.figure = el("figure", { class: "chart" },
        el("figcaption", {}, el("h3", {}, title, " ", this.at), this.legend), this.box);
      this.box.onresized = () => this.plot && this.plot.width !== this.width() && this.plot.setSize(this.size());
      resized.observe(this.box);
      charts.add(this);
    }

    width() { return Math.max(120, Math.floor(this.box.clientWidth)); }
    size() { return { width: this.width(), height: Math.round(176 * fontScale()) }; }

    draw(spec) {
      this.spec = spec;
      const dressed = spec.series.map((line, index) => ({ tone: toneOf(index), dash: DASHES[Math.floor(index / 4) % 4], ...line }));
      const shown = dressed.filter(({ y }) => y?.some(isKnown));
      this.figure.hidden = !shown.length;
      if (!shown.length) return;
      const shape = JSON.stringify([spec.xLabel, shown.map(({ label, lo }) => [label, Boolean(lo)])]);
      this.shown = shown;
      const data = [spec.x, ...shown.flatMap(({ y, lo, hi }) => (lo ? [y, lo, hi] : [y]))];
      if (this.plot && shape === this.shape) this.plot.setData(data);
      else this.build(data, shape);
      this.box.setAttribute("aria-label", `Chart: ${this.title}. ` + shown.map(({ label, y }) =>
        `${label}: ${spec.format(y.find(isKnown))} first, ${spec.format(lastOf(y))} last`).join("; "));
      this.tell(this.plot.cursor.idx);
    }

    build(data, shape) {
      this.plot?.destroy();
      this.shape = shape;
      const series = [{}], bands = [];
      for (const { tone, dash, spans, lo } of this.shown) {
        const stroke = colour(tone);
        series.push({ stroke, width: 1.75, dash, points: { size: 4, fill: stroke }, spanGaps: spans });
        if (!lo) continue;
        bands.push({ series: [series.length + 1, series.length], fill: `${stroke}2e` });
        series.push({ points: { show: false } }, { points: { show: false } });
      }
      const axis = { stroke: colour("--muted"), font: `${12 * fontScale()}px system-ui`, ticks: { show: false } };
      const grid = { stroke: colour("--line"), width: 1 };
      this.plot = new uPlot({
        ...this.size(), series, bands, legend: { show: false }, padding: [8, 10, 0, 0],
        scales: { x: { time: false }, y: { range: this.spec.range } },
        axes: [
          { ...axis, grid: { show: false }, size: 26 * fontScale(), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] },
          { ...axis, grid, size: 54 * fontScale(), values: (_, ticks) => ticks.map((tick) => (this.spec.ticks ?? this.spec.format)(tick)) },
        ],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: this.group } },
        hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)], draw: [(plot) => this.drawErrors(plot)] },
      }, data, this.box);
      this.box.firstChild.setAttribute("aria-hidden", "true");
    }

    drawErrors(plot) {
      for (const { tone, lo, hi } of this.shown.filter((line) => line.lo)) {
        plot.ctx.strokeStyle = colour(tone);
        plot.ctx.beginPath();
        this.spec.x.forEach((x, row) => {
          if (!isKnown(lo[row])) return;
          plot.ctx.moveTo(plot.valToPos(x, "x", true), plot.valToPos(lo[row], "y", true));
          plot.ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(hi[row], "y", true));
        });
        plot.ctx.stroke();
      }
    }

    tell(index) {
      const { format, x, xLabel } = this.spec;
      const isPast = isKnown(index) && index < x.length;
      this.at.textContent = isPast ? `${xLabel} ${number(x[index])}` : "";
      this.legend.replaceChildren(...this.shown.map((line) =>
        el("li", {}, lineKey(line), line.label, " ", el("b", {}, format(isPast ? line.y[index] : lastOf(line.y))))));
    }

    remove() {
      this.plot?.destroy();
      charts.delete(this);
    }
  }

  const swatch = (box, ...parts) => svg("svg", { class: "key", viewBox: box, "aria-hidden": "true" }, ...parts);

  function lineKey({ tone, dash }) {
    const path = svg("path", { d: "M0 5H18", "stroke-dasharray": dash.join(" ") });
    path.style.stroke = `var(${tone})`;
    return swatch("0 0 18 10", path);
  }

  class ChartGrid {
    constructor(group) {
      this.group = group;
      this.drawn = new Map();
      this.node = el("div", { class: "charts" });
    }

    draw(specs) {
      for (const spec of specs) {
        if (!this.drawn.has(spec.title)) {
          const chart = new Chart(spec.title, this.group);
          this.drawn.set(spec.title, chart);
          this.node.append(chart.figure);
        }
        this.drawn.get(spec.title).draw(spec);
      }
      const titles = new Set(specs.map(({ title }) => title));
      for (const [title, chart] of this.drawn) if (!titles.has(title)) chart.figure.hidden = true;
    }
  }

  const named = (columns, prefix) => Object.keys(columns).filter((name) => name.startsWith(prefix))
    .map((name) => ({ label: name.slice(prefix.length).replaceAll("_", " ").toLowerCase(), y: columns[name] }));
  const grownAndTwin = (columns) => [
    { label: "grown", y: columns.accuracy, tone: "--kept", dash: [] },
    { label: "twin, left alone", y: columns.twin_accuracy, tone: "--muted", dash: DASHES[1] },
  ];

  function episodeCharts(episode) {
    const e = episode.epochs, base = { x: e.epoch ?? [], xLabel: "epoch", format: number };
    return [
      { ...base, title: "Held-out accuracy", format: percent, series: grownAndTwin(e) },
      { ...base, title: "Loss", series: [
        { label: "held-out", y: e.held_out_loss, tone: "--kept" }, { label: "training", y: e.train_loss, tone: "--muted", dash: DASHES[1] }] },
      { ...base, title: "Held-out score", series: [{ label: "mean, higher is better", y: e.score, tone: "--kept" }] },
      { ...base, title: "Parameters", format: whole, ticks: short, series: [{ label: "host and seeds", y: e.params }] },
      { ...base, title: "FLOPs since birth", format: short, series: [{ label: "all phases", y: e.flops }] },
      { ...base, title: "Steps of each epoch or decision", format: whole, series: [{ label: "steps", y: e.steps }] },
      { ...base, title: "Share of the episode used", format: percent, series: [{ label: "epochs, or compute", y: e.share }] },
      { ...base, title: "Alpha per slot", ...slotLines(episode, "alpha", false), range: [0, 1.05] },
      { ...base, title: "Contribution per slot ± standard error", ...slotLines(episode, "contribution", true) },
      { ...base, title: "Reward and its parts", series: [{ label: "reward", y: e.reward, tone: "--ink" }, ...named(e, "part.")] },
    ];
  }

  // Between two seeds of a slot its line has a gap (null); a reading that was thinned out does not break it (undefined).
  function slotLines(episode, column, hasErrors) {
    const told = episode.spans.filter(({ readings }) => readings.epoch?.length).map(({ readings, ...span }) => {
      const isTold = readings.epoch[0] <= startOf(span), fromBirth = (first, later) => (isTold ? later : [first, ...later]);
      return { slot: placeOf(span), epochs: fromBirth(startOf(span), readings.epoch), errors: fromBirth(0, readings.standard_error),
        values: fromBirth(null, readings[column]) };
    });
    const x = [...new Set(told.flatMap(({ epochs }) => epochs))].sort((a, b) => a - b);
    const place = new Map(x.map((epoch, index) => [epoch, index]));
    const series = [...new Set(told.map(({ slot }) => slot))].sort().map((label) => {
      const line = { label, y: Array(x.length).fill(null) };
      if (hasErrors) Object.assign(line, { lo: [...line.y], hi: [...line.y] });
      for (const { epochs, values, errors } of told.filter(({ slot }) => slot === label)) {
        line.y.fill(undefined, place.get(epochs[0]) + 1, place.get(epochs.at(-1)));
        epochs.forEach((epoch, row) => {
          const at = place.get(epoch);
          line.y[at] = values[row] ?? line.y[at] ?? null;
          if (!hasErrors || !isKnown(values[row])) return;
          line.lo[at] = values[row] - (errors[row] ?? 0);
          line.hi[at] = values[row] + (errors[row] ?? 0);
        });
      }
      return line;
    });
    return { x, series };
  }

  function roundCharts(r) {
    const base = { x: r.round ?? [], xLabel: "round", format: number };
    const decisions = (r.round ?? []).map((_, row) => named(r, "op.").reduce((sum, { y }) => sum + (y[row] ?? 0), 0));
    const ops = named(r, "op.").map(({ label, y }) => ({ label, y: y.map((n, row) => (decisions[row] ? n / decisions[row] : null)) }));
    return [
      { ...base, title: "Return", series: [{ label: "mean over hosts", y: r.mean_return }] },
      { ...base, title: "Accuracy at the end of the episode", format: percent, series: grownAndTwin(r) },
      { ...base, title: "Parameters at the end of the episode", format: times, series: [{ label: "of the host's", y: r.params_share }] },
      { ...base, title: "Reward parts per episode", series: named(r, "part.") },
      { ...base, title: "What the policy does", format: percent, series: ops },
      { ...base, title: "Policy step", series: [{ label: "KL", y: r.kl }, { label: "clipped share", y: r.clip_fraction }] },
      { ...base, title: "Entropy per head", series: named(r, "entropy.") },
      { ...base, title: "Explained variance", series: [{ label: "of returns", y: r.explained_variance }] },
      { ...base, title: "Losses of the update", series: [{ label: "value", y: r.value_loss }, { label: "policy", y: r.policy_loss }] },
      { ...base, title: "First minibatch's ratio gap", series: [{ label: "distance from 1", y: r.first_ratio_gap }] },
    ];
  }

  // ---- the growth timeline ----
  const LANE = 50, STRATUM = 5, MOST_STRATA = 6;

  class Timeline {
    constructor(onchosen) {
      this.onchosen = onchosen;
      this.groups = new Map();
      this.back = svg("g", { "aria-hidden": "true" });
      this.front = svg("g", { role: "presentation" });
      this.root = svg("svg", { role: "listbox", class: "timeline", "aria-label": "Seeds by slot and epoch; arrow keys move between them", onkeydown: (event) => this.move(event) },
        this.back, this.front);
      this.empty = el("p", { class: "quiet" }, "Nothing has been planted in this episode yet.");
      this.frame = el("div", {}, this.root);
      this.node = el("div", { class: "timeline-box" }, this.frame, this.empty, stageKey());
      this.frame.onresized = () => this.episode && this.frame.clientWidth !== this.width && this.draw(this.episode, this.slots, this.length);
      resized.observe(this.frame);
    }

    draw(episode, slots, length) {
      Object.assign(this, { episode, slots, length });
      this.now = lastOf(episode.epochs.epoch) ?? 0;
      this.measure();
      this.empty.hidden = episode.spans.length > 0;
      this.back.replaceChildren(...this.axis(), ...this.lanes(), ...this.strip());
      const seen = new Set();
      episode.spans.forEach((span) => this.place(span, seen));
      for (const [name, group] of this.groups) {
        if (seen.has(name)) continue;
        group.remove();
        this.groups.delete(name);
      }
      this.keepOneTabStop();
      if (this.chosen && this.groups.has(this.chosen)) this.tell(this.groups.get(this.chosen).span);
    }

    measure() {
      this.u = fontScale();
      this.width = this.frame.clientWidth;
      this.names = Object.fromEntries(this.episode.spans.map(({ slot, module }) => [slot, module ?? ""]));
      const longest = Math.max(...Object.values(this.names).map((name) => name.length));
      this.letters = Math.max(7, Math.min(18, longest, Math.floor(this.width / this.u / 30)));
      this.left = (6.2 * this.letters + 3) * this.u;
      this.right = this.width - 54 * this.u;
      const hasStrip = this.episode.epochs.accuracy?.some(isKnown);
      this.top = (hasStrip ? Math.min(230, Math.max(112, this.width / this.u / 5)) : 20) * this.u;
      this.last = Math.max(this.length ?? 0, this.now, 1);
      this.tops = {};
      let y = this.top;
      for (const slot of this.slots) {
        this.tops[slot] = y;
        y += (LANE + STRATUM * Math.min(this.kept(slot).length, MOST_STRATA)) * this.u;
      }
      this.bottom = y;
      this.root.setAttribute("width", this.width);
      this.root.setAttribute("height", y + 40 * this.u);
    }

    kept(slot) { return this.episode.spans.filter((span) => span.slot === slot && span.fate === "FOSSILIZED"); }
    x(epoch) { return this.left + (epoch / this.last) * (this.right - this.left); }
    text(x, y, words, kind, anchor = "start") { return svg("text", { x, y, class: kind, "text-anchor": anchor }, words); }

    strip() {
      const { epoch = [], accuracy = [], twin_accuracy: twin = [] } = this.episode.epochs;
      const all = [...accuracy, ...twin].filter(isKnown);
      if (!all.length) return [];
      const low = Math.min(...all), high = Math.max(...all), top = 14 * this.u, base = this.top - 16 * this.u;
      const y = (value) => base - ((value - low) / (high - low || 1)) * (base - top);
      const path = (values) => values.reduce((d, value, row) =>
        isKnown(value) ? `${d}${d ? "L" : "M"}${this.x(epoch[row]).toFixed(1)} ${y(value).toFixed(1)}` : d, "");
      const ends = [["grown", lastOf(accuracy)], ["twin", lastOf(twin)]].filter(([, value]) => isKnown(value));
      const heights = ends.map(([, value]) => y(value));
      if (heights.length === 2 && Math.abs(heights[0] - heights[1]) < 26 * this.u) {
        const middle = Math.min(Math.max((heights[0] + heights[1]) / 2, top + 13 * this.u), base - 13 * this.u);
        const side = heights[0] <= heights[1] ? -13 : 13;
        heights[0] = middle + side * this.u;
        heights[1] = middle - side * this.u;
      }
      const x = this.x(this.now) + 6 * this.u;
      return [
        this.text(0, top, percent(high), "tick"), this.text(0, base, percent(low), "tick"),
        svg("path", { d: `M${this.left} ${base + 4}H${this.right}`, class: "rule" }),
        svg("path", { d: path(twin), class: "curve twin" }), svg("path", { d: path(accuracy), class: "curve grown" }),
        ...ends.flatMap(([name, value], index) => [
          this.text(x, heights[index], name, `end ${name}`), this.text(x, heights[index] + 12 * this.u, percent(value), "tick")]),
      ];
    }

    lanes() {
      return this.slots.flatMap((slot) => {
        const y = this.tops[slot] + 26 * this.u;
        const fossils = this.kept(slot).slice(0, MOST_STRATA);
        return [
          this.text(0, y + 4 * this.u, slot, "lane"), this.text(0, y + 17 * this.u, endOf(this.names[slot] ?? "", this.letters), "tick"), svg("path", { d: `M${this.left} ${y}H${this.right}`, class: "rule" }),
          ...fossils.map((span, index) => svg("rect", { class: "stratum", x: this.x(span.end),
            y: y + (10 + STRATUM * index) * this.u, width: Math.max(1, this.x(span.removed ?? this.now) - this.x(span.end)), height: 3 * this.u })),
          fossils.length ? this.text(this.x(this.now) + 6 * this.u, y + 17 * this.u, `${this.kept(slot).filter((span) => !isRemoved(span)).length} kept`, "tick") : "",
        ];
      });
    }

    axis() {
      const wanted = this.last / Math.max(2, (this.right - this.left) / (64 * this.u));
      const scale = 10 ** Math.floor(Math.log10(Math.max(1, wanted)));
      const step = [1, 2, 5, 10].map((n) => n * scale).find((n) => n >= wanted);
      const ticks = Array.from({ length: Math.floor(this.last / step) + 1 }, (_, index) => index * step);
      const y = this.bottom + 8 * this.u;
      return [
        svg("path", { d: `M${this.left} ${y}H${this.right}`, class: "rule" }),
        ...ticks.flatMap((tick) => [svg("path", { d: `M${this.x(tick)} 8V${y + 5}`, class: "rule" }),
          this.text(this.x(tick), y + 18 * this.u, String(tick), "tick", "middle")]),
        this.text(this.right + 15 * this.u, y + 18 * this.u, "epoch", "tick"),
        ...this.episode.rollbacks.flatMap(({ epoch }) => [svg("path", { d: `M${this.x(epoch)} 8V${y}`, class: "rollback" }),
          this.text(this.x(epoch) + 3, 14 * this.u, "↺ rolled back", "tick")]),
        this.now < this.last ? svg("path", { d: `M${this.x(this.now)} ${this.top - 12 * this.u}V${y}`, class: "now" }) : null,
      ].filter(Boolean);
    }

    place(span, seen) {
      const name = `${span.slot}:${startOf(span)}`;
      seen.add(name);
      let group = this.groups.get(name);
      if (!group) {
        const choose = () => this.choose(name);
        group = svg("g", { class: "seed", role: "option", tabindex: -1, "aria-selected": "false",
          onfocus: choose, onpointerenter: choose, onclick: () => group.focus() });
        this.groups.set(name, group);
        this.front.append(group);
      }
      const shape = JSON.stringify([this.width, this.u, this.last, this.tops[span.slot], span, span.fate ? 0 : this.now]);
      group.span = span;
      if (group.shape === shape) return;
      group.shape = shape;
      group.setAttribute("aria-label", this.nameOf(span));
      group.replaceChildren(...this.parts(span));
    }

    nameOf(span) {
      const judged = span.verdicts.at(-1);
      const last = judged ? ` ${judged.gate} ${judged.verdict}: ${judged.reason}.` : "";
      return `${span.blueprint ?? "seed"} in ${placeOf(span)}, ${fateOf(span, this.now)}, contribution ${gain(span.contribution, span.standard_error)}.${last}`;
    }

    parts(span) {
      const { u } = this, top = this.tops[span.slot], bar = top + 18 * u, height = 16 * u;
      const from = this.x(startOf(span)), to = Math.max(this.x(span.end ?? this.now), from + 4 * u);
      const later = this.episode.spans.filter((other) => other.slot === span.slot && startOf(other) > startOf(span)).map(startOf);
      const room = this.x(later.length ? Math.min(...later) : this.last) + (later.length ? 0 : 50 * u) - from;
      const stages = span.stages.filter(([stage]) => STAGES[stage]);
      const label = span.blueprint ?? "seed", letters = Math.floor((room - 4 * u) / (6.1 * u)), fate = FATES[span.fate];
      const isTold = fate && from + room - to > 48 * u;
      const reach = Math.max(to + (isTold ? 46 : 8) * u - from, Math.min(label.length, letters) * 6.1 * u);
      const nodes = [svg("rect", { class: "ring", x: from - 3 * u, y: bar - 3 * u, width: to - from + 6 * u, height: height + 6 * u, rx: 4 * u }),
        svg("rect", { class: "hit", x: from, y: top, width: reach, height: 38 * u })];
      stages.forEach(([stage, epoch], index) => {
        const x = this.x(epoch), end = index + 1 < stages.length ? this.x(stages[index + 1][1]) : to;
        if (end <= x) return;
        const place = { x, y: bar, width: end - x, height };
        nodes.push(svg("rect", { ...place, class: `stage ${STAGES[stage].tone}` }));
        if (stage === "BLENDING") nodes.push(svg("rect", { ...place, fill: "url(#hatch)" }));
      });
      if (letters >= 3) nodes.push(this.text(from, top + 13 * u, label.length > letters ? `${label.slice(0, letters - 1)}…` : label, "seed-name"));
      if (!fate) return nodes;
      nodes.push(svg("path", { d: fate.shape, class: `mark ${fate.tone}`, transform: `translate(${to} ${bar + height / 2}) scale(${u})` }));
      if (isTold) nodes.push(this.text(to + 11 * u, bar + height / 2 + 4 * u, fate.word, "seed-name"));
      return nodes;
    }

    choose(name) {
      this.groups.get(this.chosen)?.setAttribute("aria-selected", "false");
      this.chosen = name;
      this.groups.get(name).setAttribute("aria-selected", "true");
      this.keepOneTabStop();
      this.tell(this.groups.get(name).span);
    }

    tell(span) {
      const shape = JSON.stringify([span, span.fate ? 0 : this.now]);
      if (shape !== this.told) this.onchosen(span, this.now);
      this.told = shape;
    }

    keepOneTabStop() {
      const stop = this.groups.has(this.chosen) ? this.chosen : this.groups.keys().next().value;
      for (const [name, group] of this.groups) group.setAttribute("tabindex", name === stop ? 0 : -1);
    }

    move(event) {
      const here = event.target.span;
      const spans = this.episode.spans, lane = spans.filter((span) => span.slot === here?.slot);
      const near = (step) => {
        const slot = this.slots[this.slots.indexOf(here.slot) + step];
        const others = spans.filter((span) => span.slot === slot);
        return others.toSorted((a, b) => Math.abs(startOf(a) - startOf(here)) - Math.abs(startOf(b) - startOf(here)))[0];
      };
      const moves = {
        ArrowRight: () => lane[lane.indexOf(here) + 1], ArrowLeft: () => lane[lane.indexOf(here) - 1],
        ArrowDown: () => near(1), ArrowUp: () => near(-1), Home: () => lane[0], End: () => lane.at(-1),
      };
      if (!here || !(event.key in moves)) return;
      event.preventDefault();
      const next = moves[event.key]();
      if (next) this.groups.get(`${next.slot}:${startOf(next)}`).focus();
    }
  }

  function stageKey() {
    const size = { width: 18, height: 10 };
    const bar = (tone, isHatched) => swatch("0 0 18 10", svg("rect", { ...size, class: `stage ${tone}` }), isHatched ? svg("rect", { ...size, fill: "url(#hatch)" }) : null);
    const mark = ({ shape, tone }) => swatch("-9 -8 18 16", svg("path", { d: shape, class: `mark ${tone}` }));
    return el("ul", { class: "legend", "aria-label": "Key" },
      Object.entries(STAGES).map(([stage, { label, tone }]) => el("li", {}, bar(tone, stage === "BLENDING"), label)),
      Object.values(FATES).map((fate) => el("li", {}, mark(fate), fate.word)), el("li", {}, bar("kept"), "fossil, part of the host from then on"));
  }

  function showEvidence(panel, span, now) {
    panel.replaceChildren(
      el("h3", {}, `${span.blueprint ?? "seed"} in ${placeOf(span)}`),
      el("p", {}, fateOf(span, now)),
      facts([["contribution", gain(span.contribution, span.standard_error)], ["alpha", number(span.alpha)],
        ["parameters", whole(span.params)], ["age", plural(span.age, "epoch")]]),
      el("ol", { class: "gates" }, span.verdicts.map((judged) => el("li", {},
        el("b", {}, `${judged.gate} ${verdictOf(judged)}`), ` at epoch ${judged.epoch}: ${GATES[judged.gate] ?? "gate"}`,
        el("br"), `${judged.reason}. Needed: ${judged.needed}.`))));
  }

  const seedsTable = (episode) => table(`Seeds of host ${episode.host}`, ["seed", "slot", "planted", "end", "fate", "contribution", "parameters"],
    episode.spans.map((span) => [span.blueprint ?? "seed", placeOf(span), startOf(span), span.end ?? "–", wordOf(span),
      gain(span.contribution, span.standard_error), whole(span.params)]), [2, 3, 6]);

  function episodeWords(episode) {
    const count = (fate) => episode.spans.filter((span) => span.fate === fate).length;
    const left = episode.spans_left_out ? ` (the last ${episode.spans.length} of ${episode.spans.length + episode.spans_left_out} are drawn)` : "";
    return `${plural(episode.spans.length, "seed")} planted${left}, ${count("FOSSILIZED")} kept, ${count("CULLED")} culled, ${plural(episode.spans.filter(isRemoved).length, "fossil")} removed late, ${count(null)} alive; ` +
      `${plural(episode.actions, "action")}, ${plural(episode.rollbacks.length, "rollback")}.`;
  }

  // ---- what pages share with reports ----
  const words = (value) => (Array.isArray(value) ? value.join(", ") : String(value));
  const flat = (values, prefix = "") => Object.entries(values).flatMap(([name, value]) =>
    value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${prefix}${name}.`) : [[prefix + name, value]]);
  const configTable = (config) => table("What the run was started with", ["setting", "value"],
    flat(config).filter(([, value]) => value !== null).map(([name, value]) => [name, words(value)]));

  const resultsTable = (results) => table("Results on test examples", ["policy", "seed", "test accuracy", "held-out accuracy", "parameters", "kept", "culled", "FLOPs", "seconds"],
    results.map((r) => [r.arm, r.seed, percent(r.test_accuracy), percent(r.validation_accuracy), whole(r.final_params), r.fossilized, r.culled, short(r.flops), number(r.seconds)]), [1, 2, 3, 4, 5, 6, 7, 8]);

  const isNewest = (ledger, index, all) => !all.slice(index + 1).some(({ host, seed }) => host === ledger.host && seed === ledger.seed); // who harvests again closes again
  const ledgerTable = (ledgers) => table("Ledger: what each episode cost", ["host", "phase", "FLOPs", "examples", "seconds"],
    ledgers.filter(isNewest).flatMap((l) => Object.keys(l.flops ?? {}).map((phase) => [l.host, phase, short(l.flops[phase]), whole(l.examples?.[phase]), number(l.seconds?.[phase])])), [2, 3, 4]);

  const interval = ({ low, high }, form) => (isKnown(low) ? ` (${form(low)} to ${form(high)})` : "");
  const standingsTable = (rows) => table("Policies and controls: means and 95 % intervals", ["policy", "task", "epochs", "episodes", "accuracy in %", "over its control", "parameters"],
    rows.map((r) => [r.policy, r.task, whole(r.epochs), r.accuracy.count, `${exact(r.accuracy.mean)}${interval(r.accuracy, exact)} ${r.measure}`,
      r.gain ? `${points(r.gain.mean)}${interval(r.gain, points)} over ${r.control}` : "–", whole(r.params)]), [2, 3, 4, 5, 6]);

  function gateDecisions(episodes) {
    const judged = episodes.flatMap((episode) => episode.spans.flatMap((span) => span.verdicts.map((verdict) => ({ ...verdict, span, host: episode.host }))));
    const needs = [...new Set(judged.map(({ gate, needed }) => `${gate} ${GATES[gate] ?? ""}: ${needed}`))].sort();
    return [el("ul", { class: "quiet" }, needs.map((text) => el("li", {}, text))),
      table("Every verdict that was new", ["host", "epoch", "slot", "seed", "gate", "verdict", "measured", "evidence"], judged.map((v) =>
        [v.host, v.epoch, placeOf(v.span), v.span.blueprint ?? "seed", v.gate, verdictOf(v), number(v.measured), v.reason]), [1, 6])];
  }

  const anomalyList = (anomalies) => el("ul", {}, anomalies.map((a) =>
    el("li", {}, `round ${a.round}: ${a.kind} is ${number(a.value)}, limit ${number(a.limit)} ${a.where ?? ""}`)));

  const worthOf = (w) => [
    el("p", {}, `After epoch ${w.epoch}, held-out ${w.measure} on ${whole(w.examples)} examples: ${number(w.whole)}. Without all that grew: ${number(w.without_all)}, ` +
      `a gain of ${gain(w.gain, w.standard_error)}. The host has learnt to rely on what grew: by itself, it would have learnt otherwise.`),
    el("p", {}, `Parameters: ${whole(w.params)}, ${times(w.params / w.host_params)} the host's.` +
      (w.host_flops ? ` FLOPs of an example: ${short(w.flops)}, ${times(w.flops / w.host_flops)} the host's.` : "")),
    table("With each part switched off", ["seed", "slot", "stage", `${w.measure} without it`, "gain of having it", "parameters", "FLOPs"], w.parts.map((part) =>
      [part.blueprint ?? "seed", placeOf(part), part.stage, number(part.without), gain(part.gain, part.standard_error), whole(part.params), short(part.flops)]), [3, 4, 5, 6]),
  ];

  const outcome = (id, { anomalies, results, ledgers, worth }) => [
    anomalies.length ? section(`${id}-anomalies`, "Updates that do not look healthy", anomalyList(anomalies)) : "",
    results.length ? section(`${id}-results`, "Results", resultsTable(results)) : "",
    worth.length ? section(`${id}-worth`, "Was it worth it?", ...worthOf(worth.at(-1))) : "",
    ledgers.length ? section(`${id}-ledger`, "Ledger", ledgerTable(ledgers)) : "",
  ];

  function headline(h) {
    return facts([
      [h.kind === "ppo" ? "rounds" : "epochs", h.total ? `${h.done} of ${h.total}` : whole(h.done)], ["best accuracy", percent(h.best_accuracy)],
      ["over twin, last round", isKnown(h.over_twin) ? `${points(h.over_twin)} points` : null],
      ["parameters", whole(h.params)], ["hosts", String(h.hosts.length)], ["events", whole(h.events)],
      ["not understood", h.unknown ? whole(h.unknown) : null],
    ]);
  }

  const badge = (status) => el("span", { class: `badge ${status === "running" ? "live" : ""}` }, status);
  const subtitle = (h) => `${h.task} · ${h.kind === "ppo" ? "a policy taught by PPO" : `grown by ${h.policy}`}`;

  function growthPart() {
    const panel = el("aside", { class: "evidence", "aria-label": "Gate evidence", "aria-live": "polite" },
      el("p", { class: "quiet" }, "Point at a seed, or move to it with the keyboard, to see what its gates saw."));
    const drawing = new Timeline((span, now) => showEvidence(panel, span, now));
    const summary = el("p", { class: "quiet" });
    const details = el("details", { ontoggle: () => details.open && showTable() }, el("summary", {}, "The same as a table"), el("div"));
    const showTable = () => details.lastChild.replaceChildren(seedsTable(drawing.episode));
    const draw = (episode, slots, length) => {
      summary.textContent = episodeWords(episode);
      drawing.draw(episode, slots, length);
      if (details.open) showTable();
    };
    return { draw, node: el("div", { class: "growth-part" }, summary, el("div", { class: "growth" }, drawing.node, panel), details) };
  }

  // ---- pages ----
  let leave = () => {};
  const address = (name) => encodeURIComponent(name).replaceAll("%2F", "/");
  const say = (text) => { byId("connection").textContent = text; };

  async function ask(path) {
    const answer = await fetch(path, { headers: { accept: "application/json" } });
    if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 200)}`);
    return answer.json();
  }

  function every(seconds, act) {
    let timer = null, isOver = false;
    const turn = async () => {
      try {
        await act();
        say("");
      } catch (problem) {
        say(`no answer from esper serve (${problem.message})`);
      }
      if (!isOver) timer = setTimeout(turn, 1000 * seconds);
    };
    turn();
    return () => { isOver = true; clearTimeout(timer); };
  }

  function listPage(main) {
    const chosen = new Set(), rows = new Map();
    const body = el("tbody");
    const none = el("p", { class: "quiet", hidden: "" }, "No runs in this folder yet. Start one: esper run --out runs/first");
    const compare = el("button", { type: "button", disabled: "", onclick: () => {
      location.hash = `#/compare?${[...chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
    } }, "Compare");
    const head = ["", "run", "status", "task", "policy", "progress", "best accuracy", "parameters", "changed"];
    main.append(el("h1", { tabindex: -1 }, "Runs"), el("p", { class: "quiet" }, "Choose two or more to compare them. ", compare),
      el("table", { class: "runs" }, el("caption", { class: "hidden" }, "Runs in this folder"),
        el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name || el("span", { class: "hidden" }, "compare"))))), body), none);
    const toggle = (name) => (event) => {
      chosen[event.target.checked ? "add" : "delete"](name);
      compare.disabled = chosen.size < 2;
      compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    };
    leave = every(2, async () => {
      const { runs } = await ask("api/runs");
      none.hidden = runs.length > 0;
      for (const run of runs) {
        if (!rows.has(run.name)) rows.set(run.name, runRow(run.name, toggle(run.name)));
        fillRow(rows.get(run.name), run);
      }
      const nodes = runs.map((run) => rows.get(run.name));
      if (nodes.length !== body.children.length || nodes.some((node, index) => body.children[index] !== node)) body.replaceChildren(...nodes);
    });
  }

  function runRow(name, ontoggle) {
    return el("tr", {}, el("td", {}, el("input", { type: "checkbox", "aria-label": `compare ${name}`, onchange: ontoggle })),
      el("th", { scope: "row" }, el("a", { href: `#/run/${address(name)}` }, name)), Array.from({ length: 7 }, () => el("td")));
  }

  const progressOf = ({ done, total, kind }) => (total ? `${done} of ${total} ${kind === "ppo" ? "rounds" : "epochs"}` : done ? plural(done, "epoch") : "–");

  function fillRow(row, run) {
    const texts = [run.task ?? "–", run.policy ?? "–", progressOf(run), percent(run.best_accuracy), whole(run.params), ago(run.age_seconds)];
    if (row.status !== run.status) row.cells[2].replaceChildren(badge(run.status));
    row.status = run.status;
    texts.forEach((text, index) => { if (row.cells[index + 3].textContent !== text) row.cells[index + 3].textContent = text; });
  }

  const LOG_LINES = 200;

  function runPage(main, name, wanted) {
    const at = { host: Number(wanted.get("host") ?? 0), round: wanted.has("round") ? Number(wanted.get("round")) : null };
    const state = { header: null, episode: null };
    const top = el("div"), rest = el("div"), status = el("span"), lines = el("ol");
    const log = el("div", { class: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Event log" }, lines);
    const growth = growthPart(), ofEpisode = new ChartGrid("episode"), ofRounds = new ChartGrid("rounds");
    const host = el("select", { id: "host", onchange: () => go({ host: Number(host.value) }) });
    const round = el("input", { id: "round", type: "number", min: 0, onchange: () => go({ round: round.value === "" ? null : Number(round.value) }) });
    const latest = el("button", { type: "button", onclick: () => go({ round: null }) }, "latest");
    const rounds = el("span", { hidden: "" }, el("label", { for: "round" }, "round"), round, latest);
    const across = section("rounds", "Across rounds", ofRounds.node);
    const progress = el("progress", { "aria-label": "progress" });
    main.append(el("h1", { tabindex: -1 }, name, " ", status), top, progress,
      section("growth", "Growth", el("form", { class: "choose", onsubmit: (event) => event.preventDefault() },
        el("label", { for: "host" }, "host"), host, rounds), growth.node),
      section("episode", "This episode", ofEpisode.node), across, rest, section("log", "Event log", log));
    let stream = null;

    function go(change) {
      Object.assign(at, change);
      const query = new URLSearchParams({ host: at.host, ...(at.round === null ? {} : { round: at.round }) });
      history.replaceState(null, "", `#/run/${address(name)}?${query}`);
      open();
    }

    async function open() {
      stream?.close();
      stream = new EventSource(`api/runs/${address(name)}/stream?host=${at.host}`);
      stream.onmessage = ({ data }) => take(JSON.parse(data));
      stream.onopen = () => say("");
      stream.onerror = () => say(stream.readyState === EventSource.CLOSED ? "this run cannot be read" : "no answer from esper serve; trying again");
      if (at.round === null) return;
      const query = new URLSearchParams(at).toString();
      try {
        const episode = await ask(`api/runs/${address(name)}/episode?${query}`);
        if (query !== new URLSearchParams(at).toString()) return;
        state.episode = episode;
        if (state.header) drawEpisode();
      } catch (problem) {
        say(`round ${at.round} cannot be shown (${problem.message})`);
      }
    }

    function take(message) {
      const longest = message.whole ? 0 : state.header.epochs; // an episode that has just begun is drawn as long as those before
      state.header = { ...message.header, epochs: Math.max(longest, message.header.epochs) };
      if (message.episode && at.round === null) state.episode = message.episode;
      drawHeader(state.header);
      if (state.episode) drawEpisode();
      if (message.rounds) ofRounds.draw(roundCharts(message.rounds));
      if (message.log) drawLog(message.log, message.whole);
      if (message.rest) drawRest(message.rest);
      main.dataset.events = state.header.events;
    }

    function drawHeader(h) {
      status.replaceChildren(badge(h.status));
      top.replaceChildren(el("p", { class: "quiet" }, subtitle(h)), headline(h));
      Object.assign(progress, { value: h.done, max: Math.max(1, h.total), hidden: !h.total });
      across.hidden = rounds.hidden = h.kind !== "ppo";
      round.max = h.round;
      if (document.activeElement !== round) round.value = at.round ?? h.round;
      latest.disabled = at.round === null;
      if (host.options.length !== h.hosts.length) host.replaceChildren(...h.hosts.map((n) => el("option", { value: n }, String(n))));
      host.value = at.host;
    }

    function drawEpisode() {
      growth.draw(state.episode, state.header.slots, state.header.epochs);
      ofEpisode.draw(episodeCharts(state.episode));
    }

    function drawLog(news, isWhole) {
      const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      if (isWhole) lines.replaceChildren();
      lines.append(...news.map(({ kind, host, text }) => el("li", {}, el("b", {}, kind), ` ${isKnown(host) ? `host ${host}, ` : ""}${text}`)));
      while (lines.children.length > LOG_LINES) lines.firstChild.remove();
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }

    function drawRest(told) {
      rest.replaceChildren(...outcome("run", told),
        section("config", "Configuration", el("details", {}, el("summary", {}, "All settings"), configTable(told.config))));
    }

    open();
    leave = () => stream.close();
  }

  function compareCharts(runs) {
    const tones = new Map(runs.map(({ header }, index) => [header.name, index]));
    const overlay = (kind, title, column, format, xName, ticks) => {
      const of = runs.filter((run) => run.header.kind === kind && run.curves[column]?.some(isKnown));
      if (!of.length) return [];
      const [x, ...lines] = of.length === 1 ? [of[0].curves[xName], of[0].curves[column]] : uPlot.join(of.map(({ curves }) => [curves[xName], curves[column]]));
      return [{ title, x, xLabel: xName, format, ticks, series: of.map(({ header }, index) => {
        const place = tones.get(header.name);
        return { label: header.name, y: lines[index], spans: true, tone: toneOf(place), dash: DASHES[place % 4] };
      }) }];
    };
    return [
      overlay("run", "Held-out accuracy, mean over hosts", "accuracy", percent, "epoch"),
      overlay("run", "Held-out loss, mean over hosts", "held_out_loss", number, "epoch"),
      overlay("run", "Held-out score, mean over hosts", "score", number, "epoch"),
      overlay("run", "Parameters, mean over hosts", "params", whole, "epoch", short),
      overlay("ppo", "Accuracy at the end of the episode", "accuracy", percent, "round"),
      overlay("ppo", "Return", "mean_return", number, "round"),
      overlay("ppo", "Parameters of the host's", "params_share", times, "round"),
    ].flat();
  }

  function comparePage(main, names) {
    const grid = new ChartGrid("compare"), tables = el("div");
    main.append(el("h1", { tabindex: -1 }, `Compare ${plural(names.length, "run")}`), section("curves", "Curves", grid.node), section("table", "Table", tables));
    const query = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
    let shape = "";
    leave = every(2, async () => {
      const { runs, standings } = await ask(`api/compare?${query}`);
      const now = JSON.stringify([runs.map(({ header }) => [header.events, header.status]), standings]);
      if (now === shape) return;
      shape = now;
      grid.draw(compareCharts(runs));
      tables.replaceChildren(runsTable(runs.map(({ header }) => header)), standings.length ? standingsTable(standings) : "");
    });
  }

  const runsTable = (headers) => table("All runs", ["run", "status", "task", "policy", "progress", "best held-out accuracy", "parameters"],
    headers.map((h) => [h.name, h.status, h.task, h.policy, progressOf(h), percent(h.best_accuracy), whole(h.params)]), [4, 5, 6]);

  // ---- the report ----
  function reportPage(main, report) {
    document.documentElement.classList.add("paper");
    document.title = `esper report: ${report.runs.map(({ header }) => header.name).join(", ")}`;
    main.append(el("h1", {}, report.runs.length === 1 ? report.runs[0].header.name : `${report.runs.length} runs`),
      el("p", { class: "quiet" }, `Report of esper ${report.version}, written on ${report.date}.`));
    if (report.standings.length) main.append(section("standings", "Final table", standingsTable(report.standings),
      el("p", { class: "quiet" }, "Spread is the standard deviation over episodes. The difference is paired: by host seed with the run that never grows, or each episode with its twin.")));
    if (report.runs.length > 1) {
      const grid = new ChartGrid("compare");
      main.append(section("curves", "Runs side by side", runsTable(report.runs.map(({ header }) => header)), grid.node));
      grid.draw(compareCharts(report.runs));
    }
    report.runs.forEach((run, index) => reportRun(main, run, index));
  }

  function reportRun(main, run, index) {
    const id = (part) => `run-${index}-${part}`, { header, episodes, rest } = run;
    const article = el("article", { "aria-label": header.name }, el("h2", { class: "run-name" }, header.name, " ", badge(header.status)),
      el("p", { class: "quiet" }, subtitle(header)), headline(header));
    main.append(article);
    const add = (part, title, ...nodes) => article.append(section(id(part), title, ...nodes));
    const ofEpisode = new ChartGrid(id("episode")), ofRounds = new ChartGrid(id("rounds"));
    if (header.kind === "ppo" && run.rounds.round?.length) add("rounds", "Curves across rounds", ofRounds.node);
    if (episodes.length) add("growth", header.kind === "ppo" ? `Growth in round ${episodes[0].round}` : "Growth");
    const drawings = episodes.map((episode) => ({ episode, part: growthPart() }));
    for (const { episode, part } of drawings) article.lastChild.append(el("h3", {}, `Host ${episode.host}`), part.node);
    if (run.episodes_left_out) article.lastChild.append(el("p", { class: "quiet" }, `${plural(run.episodes_left_out, "more host")} of this run not drawn.`));
    if (episodes.length) add("episode", `Curves of host ${episodes[0].host}`, ofEpisode.node);
    article.append(...outcome(`run-${index}`, rest));
    if (episodes.length) add("gates", "Gate decisions", ...gateDecisions(episodes));
    add("config", "Configuration", configTable(rest.config));
    add("again", "How to reproduce", el("p", {}, run.advice), el("pre", { tabindex: 0 }, el("code", {}, run.command.join("\n"))));
    for (const { episode, part } of drawings) part.draw(episode, header.slots, header.epochs);
    ofRounds.draw(header.kind === "ppo" ? roundCharts(run.rounds) : []);
    if (episodes.length) ofEpisode.draw(episodeCharts(episodes[0]));
  }

  // ---- start ----
  function route() {
    if (location.hash && !location.hash.startsWith("#/")) return;
    leave();
    resized.disconnect();
    for (const chart of charts) chart.remove();
    const [path, query] = location.hash.slice(2).split("?");
    const wanted = new URLSearchParams(query ?? ""), main = byId("main");
    main.replaceChildren();
    delete main.dataset.events;
    say("");
    const name = path.startsWith("run/") ? decodeURIComponent(path.slice(4)) : "";
    const title = name || (path === "compare" ? "compare" : "");
    byId("trail").textContent = title ? ` / ${title}` : "";
    document.title = title ? `${title} · esper` : "esper";
    if (name) runPage(main, name, wanted);
    else if (path === "compare") comparePage(main, wanted.getAll("run"));
    else listPage(main);
    main.querySelector("h1").focus({ preventScroll: true });
  }

  function redrawAll() {
    for (const chart of charts) {
      if (!chart.plot) continue;
      chart.shape = null;
      chart.draw(chart.spec);
    }
  }

  const hatch = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("path", { d: "M0 0V6", class: "hatch" }));
  document.body.append(svg("svg", { class: "hidden", "aria-hidden": "true" }, hatch));
  const report = byId("report-data");
  if (report) reportPage(byId("main"), JSON.parse(report.textContent));
  else {
    if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);
    addEventListener("hashchange", route);
    route();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
})();
