"use strict";
// One run, followed while it is written: header, growth, curves, outcome and event log.

const LOG_LINES = 200;

class RunPage {
  constructor(main, name, wanted) {
    this.main = main;
    this.name = name;
    this.host = Number(wanted.get("host") ?? 0);
    this.round = wanted.has("round") ? Number(wanted.get("round")) : null; // null is the newest
    this.header = null; // as of the newest message
    this.episode = null;
    this.stream = null;
    this.growth = growthPart();
    this.actions = folded("The last action of each host", el("div"));
    this.ofEpisode = new ChartGrid("episode");
    this.ofRounds = new ChartGrid("rounds");
    this.build();
    this.open();
  }

  // ---- the page's nodes ----
  build() {
    this.status = el("span");
    this.top = el("div");
    this.findings = el("div");
    this.costs = el("div");
    this.progress = el("progress", { "aria-label": "progress" });
    this.across = section("rounds", "Across rounds", this.ofRounds.node);
    this.lines = el("ol");
    this.log = el("div", {
      class: "log",
      tabindex: 0,
      role: "log",
      "aria-live": "off",
      "aria-label": "Event log",
    }, this.lines);
    this.main.append(
      el("h1", { tabindex: -1 }, this.name, " ", this.status),
      this.top,
      this.progress,
      section("growth", "Growth", this.buildChoice(), this.growth.node, this.actions),
      section("episode", "This episode", this.ofEpisode.node),
      this.across,
      this.findings,
      el("div", { class: "pair" }, this.costs, section("log", "Event log", this.log)));
  }

  buildChoice() {
    this.hostChoice = el("select", {
      id: "host",
      onchange: () => this.go({ host: Number(this.hostChoice.value) }),
    });
    this.roundChoice = el("input", {
      id: "round",
      type: "number",
      min: 0,
      onchange: () => {
        const text = this.roundChoice.value;
        this.go({ round: text === "" ? null : Number(text) });
      },
    });
    this.latest = el("button", { type: "button", onclick: () => this.go({ round: null }) }, "latest");
    this.rounds = el("span", { hidden: "" },
      el("label", { for: "round" }, "round"),
      this.roundChoice,
      this.latest);
    return el("form", { class: "choose", onsubmit: (event) => event.preventDefault() },
      el("label", { for: "host" }, "host"),
      this.hostChoice,
      this.rounds);
  }

  // ---- which episode is shown ----
  query() {
    const round = this.round === null ? {} : { round: this.round };
    return new URLSearchParams({ host: this.host, ...round }).toString();
  }

  go(change) {
    Object.assign(this, change);
    history.replaceState(null, "", `#/run/${address(this.name)}?${this.query()}`);
    this.open();
  }

  async open() {
    this.stream?.close();
    const stream = new EventSource(`api/runs/${address(this.name)}/stream?host=${this.host}`);
    this.stream = stream;
    stream.onmessage = ({ data }) => this.take(JSON.parse(data));
    stream.onopen = () => say("");
    stream.onerror = () => {
      const isOver = stream.readyState === EventSource.CLOSED;
      say(isOver ? "this run cannot be read" : "no answer from esper serve; trying again");
    };
    if (this.round !== null) await this.openRound();
  }

  // An older round does not come by the stream. What was asked for meanwhile wins.
  async openRound() {
    const query = this.query();
    try {
      const episode = await ask(`api/runs/${address(this.name)}/episode?${query}`);
      if (query !== this.query()) return;
      this.episode = episode;
      if (this.header) this.drawEpisode();
    } catch (problem) {
      say(`round ${this.round} cannot be shown (${problem.message})`);
    }
  }

  close() {
    this.stream.close();
  }

  // ---- what the server says ----
  take(message) {
    // an episode that has just begun is drawn as long as those before
    const longest = message.whole ? 0 : this.header.epochs;
    this.header = { ...message.header, epochs: Math.max(longest, message.header.epochs) };
    if (message.episode && this.round === null) this.episode = message.episode;
    this.drawHeader();
    if (this.episode) this.drawEpisode();
    if (message.rounds) this.ofRounds.draw(roundCharts(message.rounds, message.header.modules));
    if (message.log) this.drawLog(message.log, message.whole);
    if (message.rest) this.drawRest(message.rest);
    this.main.dataset.events = this.header.events;
  }

  drawHeader() {
    const { header, hostChoice, roundChoice } = this;
    this.status.replaceChildren(badge(header.status));
    this.top.replaceChildren(el("p", { class: "quiet" }, subtitle(header)), headline(header));
    this.progress.value = header.done;
    this.progress.max = Math.max(1, header.total);
    this.progress.hidden = !header.total;
    this.across.hidden = header.kind !== "ppo";
    this.rounds.hidden = header.kind !== "ppo";
    roundChoice.max = header.round;
    if (document.activeElement !== roundChoice) roundChoice.value = this.round ?? header.round;
    this.latest.disabled = this.round === null;
    if (hostChoice.options.length !== header.hosts.length) {
      const options = header.hosts.map((host) => el("option", { value: host }, String(host)));
      hostChoice.replaceChildren(...options);
    }
    hostChoice.value = this.host;
    this.drawActions(header.last_actions);
  }

  // Of one host alone the line above its timeline says it.
  drawActions(actions) {
    this.actions.hidden = this.header.hosts.length < 2 || !actions.length;
    this.actions.lastChild.replaceChildren(actionsTable(actions));
  }

  drawEpisode() {
    this.growth.draw(this.episode, this.header);
    this.ofEpisode.draw(episodeCharts(this.episode, this.header.modules));
  }

  drawLog(events, isWhole) {
    const { log, lines } = this;
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    if (isWhole) lines.replaceChildren();
    lines.append(...events.map(logLine));
    while (lines.children.length > LOG_LINES) lines.firstChild.remove();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  drawRest(rest) {
    this.findings.replaceChildren(...findings("run", rest));
    this.costs.replaceChildren(
      ...costs("run", rest),
      section("config", "Configuration", folded("All settings", configTable(rest.config))));
  }
}

function logLine({ kind, host, text }) {
  const whose = isKnown(host) ? `host ${host}, ` : "";
  return el("li", {}, el("b", {}, kind), ` ${whose}${text}`);
}

// Returns what ends the page.
function runPage(main, name, wanted) {
  const page = new RunPage(main, name, wanted);
  return () => page.close();
}
