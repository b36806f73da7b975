"use strict";
// A figure of dots: a row per arm, a dot per host seed, the mean and its 95 % interval.

const DOT_ROW = 36; // height of a row; lengths are in units of the font's scale
const DOT_LETTER = 7.4; // width of a letter
const NARROW = 520; // below this width a label stands above its row

class DotPlot {
  constructor(title, note) {
    this.title = title;
    this.root = svg("svg", { class: "dots", role: "img" });
    this.frame = el("div", {}, this.root);
    this.node = el("figure", { class: "chart wide" },
      el("figcaption", {}, el("h3", {}, title), el("p", { class: "quiet" }, note)),
      this.frame);
    this.frame.onresized = () => {
      if (this.spec && this.frame.clientWidth !== this.width) this.draw(this.spec);
    };
    resized.observe(this.frame);
  }

  // `spec` has rows of { label, tone, values, mean, low, high, word }, the format of values, and
  // `zero` where the rows are differences.
  draw(spec) {
    this.spec = spec;
    this.node.hidden = !spec.rows.length;
    if (!spec.rows.length) return;
    this.measure();
    const { u, bottom } = this;
    this.root.setAttribute("width", this.width);
    this.root.setAttribute("height", bottom + 26 * u);
    this.root.setAttribute("aria-label", this.describe());
    this.root.replaceChildren(...this.axis(), ...spec.rows.flatMap((row, index) =>
      this.row(row, index)));
  }

  measure() {
    const { rows, zero } = this.spec;
    this.u = fontScale();
    this.width = this.frame.clientWidth;
    this.isNarrow = this.width < NARROW * this.u;
    const longest = (name) => Math.max(...rows.map((row) => row[name].length)) * DOT_LETTER;
    this.words = longest("word") * this.u;
    const side = Math.min(longest("label") + 16, 0.3 * this.width / this.u);
    this.left = (this.isNarrow ? 10 : side) * this.u;
    this.right = this.width - (this.isNarrow ? 14 * this.u : this.words + 18 * this.u);
    this.height = (this.isNarrow ? 54 : DOT_ROW) * this.u;
    this.bottom = this.height * rows.length + 10 * this.u;
    const all = rows.flatMap(({ values, mean, low, high }) => [...values, mean, low, high]);
    const ends = all.filter(isKnown).concat(zero ? [0] : []);
    const low = Math.min(...ends);
    const high = Math.max(...ends);
    const margin = (high - low) * 0.04 || Math.abs(high) * 0.05 || 1;
    this.low = low - margin;
    this.high = high + margin;
  }

  x(value) {
    return this.left + ((value - this.low) / (this.high - this.low)) * (this.right - this.left);
  }

  text(x, y, words, kind, anchor = "start") {
    return svg("text", { x, y, class: kind, "text-anchor": anchor }, words);
  }

  axis() {
    const { u, low, high, bottom, spec } = this;
    const ticks = roundTicks(low, high, (this.right - this.left) / (70 * u));
    const isZero = (tick) => spec.zero && tick === 0;
    return ticks.flatMap((tick) => [
      svg("path", {
        d: `M${this.x(tick)} 4V${bottom}`,
        class: isZero(tick) ? "rule zero" : "rule",
      }),
      this.text(this.x(tick), bottom + 16 * u, spec.ticks(tick), "tick", "middle"),
    ]);
  }

  row({ label, tone, values, mean, low, high, word }, index) {
    const { u } = this;
    const top = this.height * index;
    const y = top + this.height - 18 * u;
    const place = this.isNarrow ? top + 20 * u : y + 4 * u;
    const room = this.isNarrow ? this.width - this.words : this.left;
    const letters = Math.max(4, Math.floor((room - 10 * u) / (DOT_LETTER * u)));
    const shown = endOf(label, letters);
    const seeds = values.filter(isKnown).map((value) =>
      svg("circle", { class: "one", cx: this.x(value), cy: y, r: 3 * u }));
    const interval = isKnown(low)
      ? [svg("path", { class: "interval", d: `M${this.x(low)} ${y}H${this.x(high)}` })]
      : [];
    const group = svg("g", { class: "arm" },
      svg("title", {}, `${label}: ${word}`),
      ...interval,
      ...seeds,
      svg("circle", { class: "mean", cx: this.x(mean), cy: y, r: 6 * u }));
    group.style.setProperty("--tone", `var(${tone})`);
    const end = this.isNarrow ? this.width - 4 * u : this.right + 14 * u;
    return [
      this.text(0, place, shown, "lane"),
      group,
      this.text(end, place, word, "seed-name", this.isNarrow ? "end" : "start"),
    ];
  }

  describe() {
    return `${this.title}. ${this.spec.rows.map(({ label, word }) => `${label}: ${word}`).join("; ")}`;
  }
}
