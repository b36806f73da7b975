"""A moment of a run as lines of text: pure functions for `watch` to show. No terminal, no files, no clock."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from esper.dashboard.runs import RunSummary
from esper.dashboard.series import Series
from esper.dashboard.view import Episode, LogLine, RunView, SeedSpan
from esper.leyline.factored_actions import OP_NAMES
from esper.telemetry.events import clock

Picture = tuple[str, Text]
"""A panel's title and its lines."""
Form = Callable[[float], str]
Bounds = tuple[float, float]

LEVELS = " ▁▂▃▄▅▆▇█"
ROUNDS_OF_PACE = 5
"""Newest rounds whose mean time says how long the rest takes."""
GREEN, GREY, AMBER, VIOLET, BLUE = "#5fb49c", "#9fb0c8", "#e0a458", "#c792ea", "#7fc8f8"
STYLES = {"GERMINATED": BLUE, "TRAINING": BLUE, "BLENDING": AMBER, "PROBATIONARY": VIOLET, "CULLED": "#ef6f6c"}
SIGNS = {"running": "▶", "finished": "■", "stopped": "▲", "paused": "‖"}
_ARROW = " ─→ "
_ASCII = str.maketrans("▁▂▃▄▅▆▇█░→↓▶■▲‖·…±–│─┌┐└┘╭╮╰╯┃━┏┓┗┛", "_.-=+*%#.>v>#^=.~~-|-++++++++|=++++")


@dataclass(frozen=True)
class Moment:
    """What all panels are drawn from."""

    view: RunView
    summary: RunSummary
    episode: Episode | None
    """the chosen host's"""
    seen: Sequence[tuple[float, int]] = ()
    """clock and progress, whenever it moved while somebody watched"""
    wanted: str = ""
    """words that an event must have to be listed"""
    is_paused: bool = False
    note: str = ""
    """why there is nothing newer"""


@dataclass(frozen=True)
class SlotNow:
    """One slot at this moment."""

    name: str
    stage: str
    seed: SeedSpan | None
    past: str
    """what became of the seed before, where there is none now"""
    fossils: int


def clean(text: str) -> str:
    """One line that cannot steer a terminal: what is not printable becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def to_ascii(text: str) -> str:
    """The text in ASCII, in exactly as many cells."""
    if text.isascii():
        return text
    text = text.replace(" ± ", " +-").translate(_ASCII)
    return "".join(letter if letter.isascii() else "?" * cell_len(letter) for letter in text)


def bar(share: float, width: int) -> str:
    """A share of 0 to 1 as a bar; the least bit above 0 is seen."""
    full = max(1, round(min(1.0, share) * width)) if share > 0 else 0
    return "█" * full + "░" * (width - full)


def resample(values: Sequence[float], width: int) -> list[float]:
    """As many means of neighbours, or repeats, as there are columns; NaN where nothing is measured."""
    found = []
    for column in range(width if len(values) else 0):
        first = column * len(values) // width
        part = values[first : max(first + 1, (column + 1) * len(values) // width)]
        finite = [value for value in part if math.isfinite(value)]
        found.append(sum(finite) / len(finite) if finite else math.nan)
    return found


def bounds(*columns: Iterable[float]) -> Bounds:
    """Least and greatest of all that is measured."""
    finite = [value for values in columns for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def spark(values: Sequence[float], width: int, height: int = 1, between: Bounds | None = None) -> list[str]:
    """A bar per column over as many rows; blank is not measured, the least that is measured shows one eighth."""
    low, high = between or bounds(values)
    tops = []
    for value in resample(values, width):
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5  # a half cannot overflow
        tops.append(1 + round(share * (8 * height - 1)) if math.isfinite(value) else 0)
    return [
        "".join(LEVELS[min(8, max(0, top - 8 * (height - 1 - row)))] for top in tops).ljust(width)
        for row in range(height)
    ]


def last(series: Series, name: str, form: Form) -> str:
    """The newest value, or a dash."""
    value = series.last(name)
    return "-" if value is None else form(value)


def seconds_left(moment: Moment) -> float | None:
    """By the newest rounds' own time; of a run without rounds by the pace that was seen."""
    seen, steps = moment.seen, moment.summary.total - moment.summary.done
    times = [value for value in moment.view.rounds.column("seconds")[-ROUNDS_OF_PACE:] if math.isfinite(value)]
    if not times and len(seen) > 1 and seen[-1][1] > seen[0][1]:
        times = [(seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])]
    return steps * sum(times) / len(times) if times and steps >= 0 else None


def draw_header(moment: Moment, width: int, height: int) -> Picture:
    """Whose run it is, how it stands, how far it is and how long it takes."""
    summary, left = moment.summary, seconds_left(moment)
    status = "paused" if moment.is_paused else summary.status
    text = Text.assemble((clean(summary.name), "bold"))
    text.append(f" · task {clean(summary.task)} · policy {clean(summary.policy)} · ")
    text.append(f"{SIGNS.get(status, '!')} {status}", "bold reverse" if moment.is_paused else "bold")
    text.append(", not reading on" if moment.is_paused else "")
    share = min(1.0, summary.done / summary.total) if summary.total else 0.0
    parts = [f"{summary.done} of {summary.total or '?'} {'rounds' if summary.kind == 'ppo' else 'epochs'}"]
    if summary.status == "running":
        parts.append(f"ETA {'not known' if left is None else clock(left)}")
    if summary.best_accuracy is not None:
        parts.append(f"best {summary.best_accuracy:.2%}")
    parts.append(f"{summary.events:,} events")
    if moment.view.unknown:
        parts.append(f"{moment.view.unknown:,} not understood")
    text.append(f"\n{bar(share, max(10, width // 8))} {share:4.0%} ", BLUE)
    return "", text.append(clean(moment.note), "bold reverse") if moment.note else text.append(" · ".join(parts))


def slots_now(view: RunView, episode: Episode) -> list[SlotNow]:
    """The chain of slots, in the order of execution."""
    found = []
    for name in view.slots:
        newest = episode.newest(name)
        stage = "DORMANT" if newest is None or newest.fate == "FOSSILIZED" else newest.stages[-1][0]
        fossils = sum(span.slot == name and span.fate == "FOSSILIZED" for span in episode.spans)
        past = f"{newest.blueprint}: {newest.fate} at epoch {newest.end}".lower() if newest and newest.fate else "-"
        found.append(SlotNow(name, stage, episode.alive(name), past, fossils))
    return found


def gain(seed: SeedSpan) -> str:
    """What the seed contributes, with its error."""
    if seed.contribution is None or seed.standard_error is None:
        return "not measured"
    return f"{seed.contribution:+.4f} ± {seed.standard_error:.4f}"


def fit(text: str, width: int) -> str:
    """The text in exactly as many cells."""
    text, width = clean(text), max(1, width)
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def draw_chain(moment: Moment, width: int, height: int) -> Picture:
    """The chosen host from input to output: boxes side by side where the screen has room, else a line per slot."""
    view, episode = moment.view, moment.episode
    if episode is None:
        return "host", _none("host has lived an epoch")
    hosts = sorted(view.episodes)
    title = f"host {episode.host} ({hosts.index(episode.host) + 1} of {len(hosts)})"
    title += f" · round {episode.round}" if view.kind == "ppo" else ""
    title += f" · epoch {last(episode.epochs, 'epoch', '{:.0f}'.format)}"
    title += f" · {last(episode.epochs, 'params', '{:,.0f}'.format)} parameters"
    slots = slots_now(view, episode)
    room = (width - len("input") - len("output") - len(_ARROW)) // max(1, len(slots)) - len(_ARROW)
    if not slots:
        return title, Text("input → output: nothing was planted so far")
    return title, _boxes(slots, min(40, room)) if height >= 50 and room >= 24 else _rows(slots, width)


def _boxes(slots: Sequence[SlotNow], width: int) -> Text:
    inner = width - 4
    text = Text()
    for row in range(7):
        text.append("input" if row == 3 else " " * len("input"))
        for slot in slots:
            style = STYLES.get(slot.stage, "dim")
            text.append(_ARROW if row == 3 else " " * len(_ARROW))
            if row == 0:
                text.append(f"┌─ {slot.name} ".ljust(width - 1, "─") + "┐", style)
            elif row == 6:
                text.append("└" + "─" * (width - 2) + "┘", style)
            else:
                text.append("│ ", style)
                text.append(fit(_facts(slot, inner)[row - 1], inner), f"bold {style}" if row == 1 else "")
                text.append(" │", style)
        text.append(f"{_ARROW}output\n" if row == 3 else "\n")
    text.right_crop(1)
    return text


def _facts(slot: SlotNow, width: int) -> list[str]:
    seed = slot.seed
    fossils = f"{slot.fossils} fossil{'' if slot.fossils == 1 else 's'}"
    if seed is None:
        return [slot.stage, slot.past, "", "", fossils]
    alpha = f"alpha {bar(seed.alpha, width - 11)} {seed.alpha:.2f}"
    planted = f"{seed.blueprint or '-'} ({seed.params:,})"
    return [slot.stage, planted, alpha, gain(seed), f"age {seed.age}".ljust(8) + fossils]


def _rows(slots: Sequence[SlotNow], width: int) -> Text:
    blueprint = max(9, min(20, width - 66))
    heads = f"input     {'stage':<13}{'blueprint':<{blueprint}} {'alpha':<12}{'contribution':<17} age fossils"
    text = Text.assemble((heads + "\n", "dim"))
    for slot in slots:
        seed = slot.seed
        text.append(f"  ↓ {fit(slot.name, 5)} ")
        text.append(fit(slot.stage, 13), STYLES.get(slot.stage, "dim"))
        if seed is None:
            text.append(fit(slot.past, blueprint + 34), "dim")
        else:
            text.append(f"{fit(seed.blueprint or '-', blueprint)} {bar(seed.alpha, 6)} {seed.alpha:.2f} ")
            text.append(f"{gain(seed):<17} {seed.age:>3}")
        text.append(f"{slot.fossils:>8}\n")
    return text.append("  ↓ output", "dim")


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    values: Sequence[float]
    form: Form
    between: Bounds
    style: str = ""


def draw_curves(curves: Sequence[Curve], width: int, height: int) -> Text:
    """Curves one above the other, each with its newest value and its range."""
    text = Text()
    label = max(len(curve.name) for curve in curves)
    rows = max(1, (height + 1) // len(curves) - 1)
    for curve in curves:
        low, high = map(curve.form, curve.between)
        newest = next((curve.form(value) for value in reversed(curve.values) if math.isfinite(value)), "-")
        notes = [high, *[""] * (rows - 2), low] if rows > 1 else [f"{low} to {high}"]
        room = max(1, width - label - (20 if rows > 1 else 30))
        for row, line in enumerate(spark(curve.values, room, rows, curve.between)):
            head = f"{curve.name:<{label}} {newest:>8} " if row == 0 else " " * (label + 10)
            text.append(head).append(line, curve.style).append(f" {notes[row]}\n")
        text.append("\n" if rows > 1 else "")
    text.rstrip()
    return text


def draw_episode(moment: Moment, width: int, height: int) -> Picture:
    """The chosen host's accuracy, its twin's, and its loss, epoch by epoch."""
    if moment.episode is None or not moment.episode.epochs.rows:
        return "epoch by epoch", _none("epoch is measured")
    epochs = moment.episode.epochs
    grown, twin = epochs.column("accuracy"), epochs.column("twin_accuracy")
    shared = bounds(grown, twin)
    curves = [Curve("accuracy grown", grown, "{:.2%}".format, shared, GREEN)]
    if any(math.isfinite(value) for value in twin):
        curves.append(Curve("accuracy twin", twin, "{:.2%}".format, shared, GREY))
    for name, label in (("held_out_loss", "held-out loss"), ("train_loss", "training loss")):
        values = epochs.column(name)
        curves.append(Curve(label, values, "{:.4f}".format, bounds(values), AMBER))
    return f"host {moment.episode.host}, epoch by epoch", draw_curves(curves[: max(1, height)], width, height)


def draw_rounds(moment: Moment, width: int, height: int) -> Picture:
    """Return, accuracy, twins and size, round by round."""
    rounds = moment.view.rounds
    shared = bounds(rounds.column("accuracy"), rounds.column("twin_accuracy"))
    curves = [
        Curve(label, rounds.column(name), form, between or bounds(rounds.column(name)), style)
        for name, label, form, between, style in (
            ("mean_return", "return", "{:+.3f}".format, None, VIOLET),
            ("accuracy", "accuracy", "{:.2%}".format, shared, GREEN),
            ("twin_accuracy", "twins", "{:.2%}".format, shared, GREY),
            ("params_share", "size", "{:.2f} x".format, None, AMBER),
        )
    ]
    body = draw_curves(curves, width, height) if rounds.rows else _none("round is over")
    return "mean of all hosts, round by round", body


def _none(what: str) -> Text:
    return Text(f"no {what} yet", "dim")


def draw_ops(moment: Moment, width: int, height: int) -> Picture:
    """How often each op was chosen in the round that is being lived."""
    ops = moment.view.ops
    most, whole = max(ops.values(), default=0), sum(ops.values())
    text = Text()
    for name in [*OP_NAMES, *sorted(set(ops) - set(OP_NAMES))]:
        share = ops[name] / most if most else 0.0
        text.append("\n" if text else "").append(f"{fit(name, 9)} {ops[name]:>4} ")
        text.append(bar(share, max(3, width - 15)), BLUE)
    return f"ops · {whole:,} decisions", text


def draw_reward(moment: Moment, width: int, height: int) -> Picture:
    """What the chosen host earned so far, part by part; beside it the mean of the newest finished round."""
    episode, rounds = moment.episode, moment.view.rounds
    names = [name for name in (episode.epochs if episode else rounds).columns if name.startswith("part.")]
    earned = {name: sum(filter(math.isfinite, episode.epochs.column(name))) if episode else 0.0 for name in names}
    most = max(map(abs, earned.values()), default=0.0)
    label = max((len(name) - len("part.") for name in names), default=0)
    text = Text()
    room = width - label - 23 if height > len(names) else 0
    if room >= 4:
        text.append(f"{'':<{label}} {'episode':>10} {'':<{room}} {'last round':>10}", "dim")
    for name, value in earned.items():
        text.append("\n" if text else "").append(f"{fit(name.removeprefix('part.'), min(label, width - 8))} ")
        if room >= 4:
            text.append(f"{value:>+10.3f} ").append(bar(abs(value) / most if most else 0.0, room), BLUE)
            text.append(f" {last(rounds, name, '{:+.3f}'.format):>10}")
        else:
            text.append(f"{value:>+7.3f}")
    return f"reward parts · sum {sum(earned.values()):+.3f}", text or _none("reward")


def health_numbers(view: RunView) -> list[tuple[str, str, str]]:
    """Of the update's health: label, column, newest value."""
    rounds = view.rounds
    heads = [name for name in rounds.columns if name.startswith("entropy.")]
    numbers = [
        ("KL", "kl", "{:.4f}".format),
        ("clip", "clip_fraction", "{:.2f}".format),
        ("explained variance", "explained_variance", "{:.2f}".format),
        ("first ratio gap", "first_ratio_gap", "{:.1e}".format),
        *((f"entropy {clean(name.removeprefix('entropy.'))}", name, "{:.2f}".format) for name in heads),
    ]
    return [(label, name, last(rounds, name, form)) for label, name, form in numbers]


def draw_health(moment: Moment, width: int, height: int) -> Picture:
    """The newest update: a line and a curve per number where there is room, else as many on a line as fit."""
    view = moment.view
    found = len(view.anomalies)
    title = "PPO health" + (f" · {found} anomal{'y' if found == 1 else 'ies'}!" if found else "")
    numbers = health_numbers(view)
    if not view.rounds.rows:
        return title, _none("update")
    text = Text()
    if height >= len(numbers) and width >= 40:
        for label, name, value in numbers:
            text.append("\n" if text else "").append(f"{fit(label, 18)} {value:>8} ")
            text.append(spark(view.rounds.column(name), max(1, width - 29))[0], VIOLET)
        for anomaly in view.anomalies[len(numbers) - height :] if height > len(numbers) else ():
            text.append("\n" + fit(f"! round {anomaly['round']}: {anomaly['kind']} is {anomaly['value']}", width))
        return title, text
    items = [f"{label} {value}".replace(" ", "\xa0") for label, _, value in numbers]
    short = "  ".join(items[:5] + [item.removeprefix("entropy\xa0") for item in items[5:]])
    return title, Text("\n".join(wrap(short, max(1, width))).replace("\xa0", " "))


def choose_lines(lines: Iterable[LogLine], wanted: str) -> list[LogLine]:
    """The lines that have all the words, in whatever case, in their kind, their text or their place (`r5 h3`)."""
    words = wanted.lower().split()
    return [line for line in lines if all(w in f"{line.kind} {_where(line)} {line.text}".lower() for w in words)]


def draw_log(moment: Moment, width: int, height: int) -> Picture:
    """The newest events, one a line, the newest last."""
    log = moment.view.log
    lines = choose_lines(log, moment.wanted)
    text = Text("\n").join(
        Text.assemble((f"{line.number:>7} ", "dim"), (f"{_where(line):<9}", GREY), line.text) for line in lines
    )
    title = f"events · filter {clean(moment.wanted)!r}: {len(lines)} of {len(log)}" if moment.wanted else "events"
    return title, text or _none("event" + (" with these words" if moment.wanted else ""))


def _where(line: LogLine) -> str:
    return f"r{line.round}" + ("" if line.host is None else f" h{line.host}")
