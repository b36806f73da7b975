"use strict";
// The growth timeline: a lane per slot, a bar per seed, the host's accuracy or loss above them.

const LANE = 50; // height of a lane without fossils; lengths are in units of the font's scale
const STRATUM = 5; // height of a fossil's line below its lane
const MOST_STRATA = 6;
const LETTER = 6.1; // width of a letter of a seed's name

let timelines = 0; // drawn so far; each has a name for its clip

class Timeline {
  // `onchosen` is called with the span of a seed, and the epoch, when the seed is pointed at.
  constructor(onchosen) {
    this.onchosen = onchosen;
    this.groups = new Map(); // name of a seed -> its group of shapes
    this.back = svg("g", { "aria-hidden": "true" });
    this.front = svg("g", { role: "presentation" });
    this.root = svg("svg", {
      role: "listbox",
      class: "timeline",
      "aria-label": "Seeds by slot and epoch; arrow keys move between them",
      onkeydown: (event) => this.move(event),
    }, this.back, this.front);
    this.empty = el("p", { class: "quiet" }, "Nothing has been planted in this episode yet.");
    this.frame = el("div", {}, this.root);
    this.key = el("ul", { class: "legend", "aria-label": "Key" });
    this.clip = `strip-${timelines += 1}`;
    this.isWhole = false; // whether the curves are shown from their first value on
    this.range = el("button", {
      type: "button",
      class: "range",
      hidden: "",
      "aria-pressed": "false",
      onclick: () => this.showRange(!this.isWhole),
    }, "full range");
    this.node = el("div", { class: "timeline-box" },
      this.frame,
      this.empty,
      el("div", { class: "key-line" }, this.key, this.range));
    this.frame.onresized = () => {
      const isOther = this.episode && this.frame.clientWidth !== this.width;
      if (isOther) this.draw(this.episode, { ...this, epochs: this.length });
    };
    resized.observe(this.frame);
  }

  draw(episode, { slots, modules, epochs: length }) {
    Object.assign(this, { episode, slots, modules, length });
    this.now = lastOf(episode.epochs.epoch) ?? 0;
    this.strip = stripOf(episode.epochs);
    this.hasMore = false;
    this.measure();
    this.empty.hidden = episode.spans.length > 0;
    this.back.replaceChildren(...drawAxis(this), ...drawLanes(this), ...drawStrip(this));
    this.range.hidden = !this.hasMore;
    this.key.replaceChildren(...stageKey(this));
    const names = new Set(episode.spans.map((span) => this.drawSeed(span)));
    for (const [name, group] of this.groups) {
      if (names.has(name)) continue;
      group.remove();
      this.groups.delete(name);
    }
    this.keepOneTabStop();
    if (this.chosen && this.groups.has(this.chosen)) this.tell(this.groups.get(this.chosen).span);
  }

  showRange(isWhole) {
    this.isWhole = isWhole;
    this.range.setAttribute("aria-pressed", String(isWhole));
    this.draw(this.episode, { ...this, epochs: this.length });
  }

  measure() {
    this.u = fontScale();
    this.width = this.frame.clientWidth;
    this.measureNames();
    this.right = this.width - 54 * this.u;
    this.top = (this.strip ? Math.min(230, Math.max(112, this.width / this.u / 6)) : 20) * this.u;
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

  // How many letters of the lanes' names fit left of them: modules, or else slots.
  measureNames() {
    const lengths = this.slots.map((slot) => this.nameOfLane(slot).length);
    const fitting = Math.floor(this.width / this.u / 30);
    this.letters = Math.max(6, Math.min(20, Math.max(...lengths), fitting));
    this.left = (7.4 * this.letters + 10) * this.u;
  }

  nameOfLane(slot) {
    return this.modules[slot] || slot;
  }

  kept(slot) {
    return this.episode.spans.filter((span) => span.slot === slot && span.fate === "FOSSILIZED");
  }

  x(epoch) {
    return this.left + (epoch / this.last) * (this.right - this.left);
  }

  text(x, y, words, kind, anchor = "start") {
    return svg("text", { x, y, class: kind, "text-anchor": anchor }, words);
  }

  // Draws a seed where it has changed; its group stays, so that it keeps the focus.
  drawSeed(span) {
    const name = nameOf(span);
    const group = this.groups.get(name) ?? this.addGroup(name);
    const now = span.fate ? 0 : this.now;
    const shape = JSON.stringify([this.width, this.u, this.last, this.tops[span.slot], span, now]);
    group.span = span;
    if (group.shape !== shape) {
      group.shape = shape;
      group.setAttribute("aria-label", this.describe(span));
      group.replaceChildren(...seedParts(this, span));
    }
    return name;
  }

  addGroup(name) {
    const choose = () => this.choose(name);
    const group = svg("g", {
      class: "seed",
      role: "option",
      tabindex: -1,
      "aria-selected": "false",
      onfocus: choose,
      onpointerenter: choose,
      onclick: () => group.focus(),
    });
    this.groups.set(name, group);
    this.front.append(group);
    return group;
  }

  describe(span) {
    const judged = span.verdicts.at(-1);
    const last = judged ? ` ${judged.gate} ${judged.verdict}: ${judged.reason}.` : "";
    const worth = gain(span.contribution, span.standard_error);
    return `${seedOf(span)} in ${placeOf(span)}, ${fateOf(span, this.now)}, ` +
      `contribution ${worth}.${last}`;
  }

  choose(name) {
    this.groups.get(this.chosen)?.setAttribute("aria-selected", "false");
    this.chosen = name;
    this.groups.get(name).setAttribute("aria-selected", "true");
    this.keepOneTabStop();
    this.tell(this.groups.get(name).span);
  }

  // Calls `onchosen` only where there is something new to show.
  tell(span) {
    const shape = JSON.stringify([span, span.fate ? 0 : this.now]);
    if (shape !== this.shownShape) this.onchosen(span, this.now);
    this.shownShape = shape;
  }

  keepOneTabStop() {
    const stop = this.groups.has(this.chosen) ? this.chosen : this.groups.keys().next().value;
    for (const [name, group] of this.groups) {
      group.setAttribute("tabindex", name === stop ? 0 : -1);
    }
  }

  move(event) {
    const here = event.target.span;
    const lane = this.episode.spans.filter((span) => span.slot === here?.slot);
    const moves = {
      ArrowRight: () => lane[lane.indexOf(here) + 1],
      ArrowLeft: () => lane[lane.indexOf(here) - 1],
      ArrowDown: () => this.nearest(here, 1),
      ArrowUp: () => this.nearest(here, -1),
      Home: () => lane[0],
      End: () => lane.at(-1),
    };
    if (!here || !(event.key in moves)) return;
    event.preventDefault();
    const next = moves[event.key]();
    if (next) this.groups.get(nameOf(next)).focus();
  }

  // The seed so many lanes further down that was planted at about the same time.
  nearest(here, lanes) {
    const slot = this.slots[this.slots.indexOf(here.slot) + lanes];
    const distance = (span) => Math.abs(startOf(span) - startOf(here));
    const others = this.episode.spans.filter((span) => span.slot === slot);
    return others.toSorted((a, b) => distance(a) - distance(b))[0];
  }
}

const nameOf = (span) => `${span.slot}:${startOf(span)}`;
