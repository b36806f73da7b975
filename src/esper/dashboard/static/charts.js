"use strict";
// Curves by uPlot: one chart, and a grid of them that is drawn again and again.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const X_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6];

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

// What `draw` takes: title, x, xLabel, format of values, ticks (their format, if another), range,
// and series of { label, y, lo, hi, tone, dash, spans }; lo and hi are the ends of error bars.
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
    return { width: this.width(), height: Math.round(176 * fontScale()) };
  }

  draw(spec) {
    this.spec = spec;
    const shown = spec.series.map(dressed).filter(({ y }) => y?.some(isKnown));
    this.figure.hidden = !shown.length;
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
      font: `${12 * scale}px system-ui`,
      ticks: { show: false },
    };
    const write = (_, ticks) => ticks.map((tick) => (this.spec.ticks ?? this.spec.format)(tick));
    return [
      { ...axis, grid: { show: false }, size: 26 * scale, incrs: X_STEPS },
      { ...axis, grid: { stroke: colour("--line"), width: 1 }, size: 54 * scale, values: write },
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
    const { format, x, xLabel } = this.spec;
    const isPast = isKnown(index) && index < x.length;
    const valueOf = ({ y }) => format(isPast ? y[index] : lastOf(y));
    this.at.textContent = isPast ? `${xLabel} ${number(x[index])}` : "";
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

class ChartGrid {
  constructor(group) {
    this.group = group;
    this.drawn = new Map(); // title -> chart
    this.node = el("div", { class: "charts" });
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
  }

  add(title) {
    const chart = new Chart(title, this.group);
    this.drawn.set(title, chart);
    this.node.append(chart.figure);
  }
}
