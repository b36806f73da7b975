"use strict";
// Numbers and records of a run as words. Nothing is drawn here.

const isKnown = (value) => value !== null && value !== undefined;
const known = (format) => (value) => (isKnown(value) ? format(value) : "–");

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const percent = known((value) => `${(100 * value).toFixed(1)} %`);
const exact = known((value) => (100 * value).toFixed(2));
const points = known((value) => `${value < 0 ? "−" : "+"}${exact(Math.abs(value))}`);
const whole = known((value) => Math.round(value).toLocaleString("en"));
const short = known((value) => compact.format(value));
const times = known((value) => `${value.toFixed(2)} ×`);

const number = known((value) => {
  const size = Math.abs(value);
  const isExtreme = size && (size < 1e-3 || size >= 1e5);
  const text = isExtreme ? size.toExponential(1) : Number(size.toPrecision(4)).toString();
  return value < 0 ? `−${text}` : text;
});

const ago = known((seconds) => {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([size]) => seconds >= size) ?? units.at(-1);
  return `${Math.floor(seconds / size)} ${unit} ago`;
});

function gain(mean, error) {
  if (!isKnown(mean)) return "not measured";
  return isKnown(error) ? `${number(mean)} ± ${number(error)}` : number(mean);
}

const lastOf = (values) => values?.findLast(isKnown) ?? null;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const endOf = (name, letters) => (name.length > letters ? `…${name.slice(1 - letters)}` : name);

// ---- seeds ----
const STAGES = {
  GERMINATED: { label: "germinated", tone: "germinated" },
  TRAINING: { label: "training", tone: "training" },
  BLENDING: { label: "blending", tone: "blending" },
  PROBATIONARY: { label: "probation", tone: "probation" },
};
const FATES = {
  FOSSILIZED: { word: "kept", tone: "kept", shape: "M0-7 7 0 0 7-7 0Z" },
  REMOVED: { word: "removed", tone: "removed", shape: "M0-6 6 0 0 6-6 0ZM-8 8 8-8" },
  CULLED: { word: "culled", tone: "culled", shape: "M-5-5 5 5M-5 5 5-5" },
};
const VERDICTS = { passed: "✓ passed", failed: "✗ failed" };
const GATES = {
  G0: "fits the slot",
  G1: "is in an optimiser",
  G2: "beats the host in its shadow",
  G3: "is blended in",
  G5: "has been measured",
  LATE: "pays when the rate has fallen",
};

const verdictOf = (judged) => VERDICTS[judged.verdict] ?? `– ${judged.verdict}`;
const startOf = (span) => span.stages[0]?.[1] ?? 0;
const placeOf = ({ slot, module }) => module || slot; // a slot is called as its module
const seedOf = ({ blueprint }) => blueprint ?? "seed";
const isRemoved = (span) => isKnown(span.removed);
const fateNow = (span) => FATES[isRemoved(span) ? "REMOVED" : span.fate];

function wordOf(span) {
  if (isRemoved(span)) return `kept, removed at epoch ${span.removed}`;
  return fateNow(span)?.word ?? "alive";
}

function fateOf(span, now) {
  if (fateNow(span)) return `epochs ${startOf(span)} to ${span.end}, ${wordOf(span)}`;
  const stage = STAGES[span.stages.at(-1)?.[0]]?.label ?? "alive";
  return `since epoch ${startOf(span)}, ${stage} at epoch ${now}`;
}

function episodeWords(episode) {
  const { spans } = episode;
  const count = (fate) => spans.filter((span) => span.fate === fate).length;
  const planted = spans.length + episode.spans_left_out;
  const left = episode.spans_left_out ? ` (the last ${spans.length} of ${planted} are drawn)` : "";
  const { undecided } = episode;
  const rest = undecided.length ? `${undecided.length} undecided and left out` : `${count(null)} alive`;
  const drawn = episode.drawn ? `The host is ${episode.drawn}. ` : "";
  return `${drawn}${plural(spans.length, "seed")} planted${left}, ` +
    `${count("FOSSILIZED")} kept, ${count("CULLED")} culled, ` +
    `${plural(spans.filter(isRemoved).length, "fossil")} removed late, ${rest}; ` +
    `${plural(episode.actions, "action")}, ${plural(episode.rollbacks.length, "rollback")}.` +
    (episode.last_action ? ` Last action: ${actionWords(episode.last_action)}.` : "");
}

function actionWords({ op, blueprint, blend, epoch, refused, ...place }) {
  const what = [op, blueprint, blend && `(${blend})`].filter(Boolean).join(" ");
  const end = refused ? ", refused" : "";
  return `${what} in ${placeOf(place)} at epoch ${epoch}${end}`;
}

// ---- runs ----
function progressOf({ done, total, kind }) {
  if (kind === "compare") return done ? plural(done, "arm") : "–";
  if (total) return `${done} of ${total} ${kind === "ppo" ? "rounds" : "epochs"}`;
  return done ? plural(done, "epoch") : "–";
}

function subtitle({ task, kind, policy }) {
  if (kind === "compare") return `${task} · a comparison of ${policy}`;
  return `${task} · ${kind === "ppo" ? "a policy taught by PPO" : `grown by ${policy}`}`;
}

// The best held-out reading of a run: its accuracy, or else its loss, or its score.
function bestOf({ best_accuracy: accuracy, best_loss: loss, best_score: score }) {
  if (isKnown(accuracy)) return percent(accuracy);
  if (isKnown(loss)) return `loss ${number(loss)}`;
  return isKnown(score) ? `score ${number(score)}` : "–";
}
