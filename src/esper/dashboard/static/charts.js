"use strict";
// Curves by uPlot: one chart, and a grid of them that is drawn again and again.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const WHOLE_STEPS = ROUND_STEPS.filter((step) => step >= 1);

// How a round number is written on an axis, where that is shorter than the values' own format.
const tickOf = new Map([
  [percent, (value) => `${number(Number((100 * value).toPrecision(6)))} %`],
  [times, (value) => `${number(value)} ×`],
]);

const charts = new Set(); // those on the page
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) target.onresized?.();
});

const styleOfPage = () => getComputedStyle(document.documentElement);
const colour = (name) => styleOfPage().getPropertyValue(name).trim();
const fontScale = () => parseFloat(styleOfPage().fontSize) / 16;
const toneOf = (index) => `--tone-${1 + (index % 8)}`;
const dressed = (line, index) =>
  ({ tone: toneOf(index), dash: DASHES[Math.floor(index / 4) % 4], ...line });

// What `draw` takes: title, x, xLabel, xFormat, format of values, ticks (their format, if another),
// range, isWide, isLarge, and series of { label, y, lo, hi, tone, dash, spans, isReference }; lo and hi are
// the ends of error bars. What tells nothing is left out, and is in `leftOut` as words.
class Chart {
  constructor(title, group) {
    this.group = group;
    this.title = title;
    this.at = el("span", { class: "at" });
    this.legend = el("ul", { class: "legend" });
    this.box = el("div", { class: "plot", role: "img" });
    this.figure = el("figure", { class: "chart" },
      el("figcaption", {}, el("h3", {}, title, " ", this.at), this.legend),
      this.box);
    this.box.onresized = () => {
      if (this.plot && this.plot.width !== this.width()) this.plot.setSize(this.size());
    };
    resized.observe(this.box);
    charts.add(this);
  }

  width() {
    return Math.max(120, Math.floor(this.box.clientWidth));
  }

  size() {
    const { isWide, isLarge } = this.spec;
    const height = isWide ? 260 : isLarge ? 200 : 104;
    return { width: this.width(), height: Math.round(height * fontScale()) };
  }

  draw(spec) {
    this.spec = spec;
    const series = spec.series.map(dressed);
    const { drawn: shown, named: constant } = partedByInformation({ ...spec, series });
    this.leftOut = constant.map((line) => namedWords(spec, line));
    this.figure.hidden = !shown.length;
    this.figure.classList.toggle("wide", Boolean(spec.isWide));
    this.figure.classList.toggle("large", Boolean(spec.isLarge));
    if (!shown.length) return;
    this.shown = shown;
    const shape = JSON.stringify([spec.xLabel, shown.map(({ label, lo }) => [label, Boolean(lo)])]);
    const columns = shown.flatMap(({ y, lo, hi }) => (lo ? [y, lo, hi] : [y]));
    const data = [spec.x, ...columns];
    if (this.plot && shape === this.shape) this.plot.setData(data);
    else this.build(data, shape);
    this.box.setAttribute("aria-label", this.describe());
    this.showValues(this.plot.cursor.idx);
  }

  describe() {
    const { format } = this.spec;
    const ends = this.shown.map(({ label, y }) =>
      `${label}: ${format(y.find(isKnown))} first, ${format(lastOf(y))} last`);
    return `Chart: ${this.title}. ${ends.join("; ")}`;
  }

  build(data, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const { series, bands } = this.lines();
    this.plot = new uPlot({
      ...this.size(),
      series,
      bands,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: { x: { time: false }, y: { range: this.spec.range } },
      axes: this.axes(),
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 6 },
        sync: { key: this.group },
      },
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        draw: [(plot) => this.drawErrors(plot)],
      },
    }, data, this.box);
    this.box.firstChild.setAttribute("aria-hidden", "true");
  }

  // A line with errors is three columns: itself, and both ends of the band around it.
  lines() {
    const series = [{}];
    const bands = [];
    for (const { tone, dash, spans, lo } of this.shown) {
      const stroke = colour(tone);
      series.push({ stroke, width: 1.75, dash, points: { size: 4, fill: stroke }, spanGaps: spans });
      if (!lo) continue;
      bands.push({ series: [series.length + 1, series.length], fill: `${stroke}2e` });
      series.push({ points: { show: false } }, { points: { show: false } });
    }
    return { series, bands };
  }

  axes() {
    const scale = fontScale();
    const axis = {
      stroke: colour("--muted"),
      font: `${Math.round(12 * scale)}px system-ui`, // uPlot scales whole pixels only
      ticks: { show: false },
    };
    const { ticks: tickFormat, format, xFormat = whole } = this.spec;
    const write = (words) => (_, ticks) => ticks.map(words);
    const grid = { stroke: colour("--line"), width: 1 };
    return [
      {
        ...axis,
        grid: { show: false },
        size: 26 * scale,
        incrs: WHOLE_STEPS,
        values: write(xFormat),
      },
      {
        ...axis,
        grid,
        size: 50 * scale,
        space: 20 * scale,
        incrs: ROUND_STEPS,
        values: write(tickFormat ?? tickOf.get(format) ?? format),
      },
    ];
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

  // The legend has the values under the cursor, or else the newest.
  showValues(index) {
    const { format, x, xLabel, xFormat = number } = this.spec;
    const isPast = isKnown(index) && index < x.length;
    const valueOf = ({ y }) => format(isPast ? y[index] : lastOf(y));
    this.at.textContent = isPast ? `${xLabel} ${xFormat(x[index])}` : "";
    this.legend.replaceChildren(...this.shown.map((line) =>
      el("li", {}, lineKey(line), line.label, " ", el("b", {}, valueOf(line)))));
  }

  remove() {
    this.plot?.destroy();
    charts.delete(this);
  }
}

function lineKey({ tone, dash }) {
  const path = svg("path", { d: "M0 5H18", "stroke-dasharray": dash.join(" ") });
  path.style.stroke = `var(${tone})`;
  return swatch("0 0 18 10", path);
}

// Charts side by side, and below them what is not drawn because it tells nothing.
class ChartGrid {
  constructor(group) {
    this.group = group;
    this.drawn = new Map(); // title -> chart
    this.charts = el("div", { class: "charts" });
    this.leftOut = el("p", { class: "quiet left-out", hidden: "" });
    this.node = el("div", {}, this.charts, this.leftOut);
  }

  draw(specs) {
    for (const spec of specs) {
      if (!this.drawn.has(spec.title)) this.add(spec.title);
      this.drawn.get(spec.title).draw(spec);
    }
    const titles = new Set(specs.map(({ title }) => title));
    for (const [title, chart] of this.drawn) {
      if (!titles.has(title)) chart.figure.hidden = true;
    }
    const names = specs.flatMap(({ title }) => this.drawn.get(title).leftOut);
    this.leftOut.hidden = !names.length;
    this.leftOut.textContent = `Constant or straight, so not drawn. ${names.join("; ")}.`;
  }

  add(title) {
    const chart = new Chart(title, this.group);
    this.drawn.set(title, chart);
    this.charts.append(chart.figure);
  }
}
