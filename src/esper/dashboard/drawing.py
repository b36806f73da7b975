"""A moment of a run as tables, bars and curves: pure functions for `watch` to show.

No terminal, no files, no clock.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.bar import Bar
from rich.color import Color
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.renderables.sparkline import Sparkline

from esper.dashboard.episode import Episode
from esper.dashboard.reader import RunSummary
from esper.dashboard.series import Series
from esper.dashboard.view import LogLine, RunView
from esper.leyline.errors import printable
from esper.leyline.factored_actions import OP_NAMES
from esper.telemetry.wording import clock, format_gain

Picture = tuple[str, RenderableType]  # A panel's title and what is in it.
Form = Callable[[float], str]

ROUNDS_OF_PACE = 5  # Newest rounds whose mean time says how long the rest takes.
GREEN, GREY, AMBER, VIOLET, BLUE = "#5fb49c", "#9fb0c8", "#e0a458", "#c792ea", "#7fc8f8"
STYLES = {
    "GERMINATED": BLUE,
    "TRAINING": BLUE,
    "BLENDING": AMBER,
    "PROBATIONARY": VIOLET,
    "CULLED": "#ef6f6c",
}
_PLACE = 14
"""Letters of a place's name."""

SIGNS = {"running": "▶", "finished": "■", "stopped": "▲"}


@dataclass(frozen=True)
class Moment:
    """What all panels are drawn from."""

    view: RunView
    summary: RunSummary
    episode: Episode | None  # the chosen host's
    # clock and progress, whenever it moved while the screen was open
    seen: Sequence[tuple[float, int]] = ()
    wanted: str = ""  # words that an event must have to be listed
    note: str = ""  # why there is nothing newer


def lay_out(
    rows: Iterable[Sequence[RenderableType]], wide: int, heads: Sequence[str] = ()
) -> Table:
    """Rows in columns, of which the wide one takes what is left.

    Text stays as it is: it is never markup.
    """
    rows = list(rows)
    table = Table(
        box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, show_header=bool(heads)
    )
    for number in range(max(map(len, rows), default=0)):
        head = Text(heads[number], "dim") if heads else ""
        ratio = 1 if number == wide else None
        table.add_column(head, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def bar(share: float, width: int | None = None) -> Bar:
    """Return a bar that is full where the share is 1 or more."""
    return Bar(1.0, 0.0, min(1.0, share), width=width, color=BLUE)


def spark(values: Iterable[float], style: str, height: int = 1) -> Sparkline[float]:
    """A curve of what is measured, from its least to its greatest value."""
    largest = 1e300  # beyond it a difference of two numbers may be none
    known = [max(-largest, min(largest, value)) for value in values if math.isfinite(value)]
    colour = Color.parse(style)
    return Sparkline(known, width=None, height=height, min_color=colour, max_color=colour)


def last(series: Series, name: str, form: Form) -> str:
    """The newest value, or a dash."""
    value = series.last(name)
    return "-" if value is None else form(value)


def _none(what: str) -> Text:
    return Text(f"no {what} yet", "dim")


def seconds_left(moment: Moment) -> float | None:
    """By the newest rounds' own time; of a run without rounds by the pace that was seen."""
    seen, steps = moment.seen, moment.summary.total - moment.summary.done
    times = [
        value
        for value in moment.view.rounds.column("seconds")[-ROUNDS_OF_PACE:]
        if math.isfinite(value)
    ]
    if not times and len(seen) > 1 and seen[-1][1] > seen[0][1]:
        times = [(seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])]
    return steps * sum(times) / len(times) if times and steps >= 0 else None


def draw_header(moment: Moment, width: int, height: int) -> Picture:
    """Whose run it is, how it stands, how far it is and how long it takes."""
    summary, left = moment.summary, seconds_left(moment)
    text = Text.assemble((printable(summary.name), "bold"), no_wrap=True, overflow="ellipsis")
    text.append(printable(f" · task {summary.task} · policy {summary.policy} · "))
    text.append(f"{SIGNS.get(summary.status, '!')} {summary.status}", "bold")
    share = min(1.0, summary.done / summary.total) if summary.total else 0.0
    parts = [
        f"{summary.done} of {summary.total or '?'} "
        f"{'rounds' if summary.kind == 'ppo' else 'epochs'}"
    ]
    if summary.status == "running":
        parts.append(f"ETA {'not known' if left is None else clock(left)}")
    if summary.best:
        parts.append(f"best {summary.best}")
    parts.append(f"{summary.events:,} events")
    parts += _spent(moment.view)
    if moment.view.unknown:
        parts.append(f"{moment.view.unknown:,} not understood")
    said = Text(printable(moment.note), "bold reverse") if moment.note else Text(" · ".join(parts))
    return "", Group(text, lay_out([[bar(share, 10), f"{share:4.0%}", said]], wide=2))


def _spent(view: RunView) -> list[str]:
    """What a taught policy's run has cost so far, and the shares that are not its episodes'."""
    flops = {
        what: sum(cost["flops"] for cost in phases.values()) for what, phases in view.spent.items()
    }
    total = sum(flops.values())
    if not total:
        return []
    shares = [f"{what} {flops[what] / total:.1%}" for what in flops if what != "episodes"]
    return [f"{total:.3g} FLOPs" + (f" ({', '.join(shares)})" if shares else "")]


def draw_chain(moment: Moment, width: int, height: int) -> Picture:
    """The chosen host's slots, in the order of execution."""
    view, episode = moment.view, moment.episode
    if episode is None:
        return "host", _none("host has trained an epoch")
    hosts = sorted(view.episodes)
    title = f"host {episode.host} ({hosts.index(episode.host) + 1} of {len(hosts)})"
    title += f" · round {episode.round}" if view.kind == "ppo" else ""
    title += f" · epoch {last(episode.epochs, 'epoch', '{:.0f}'.format)}"
    title += f" · {last(episode.epochs, 'params', '{:,.0f}'.format)} parameters"
    if view.config.get("task", {}).get("clock") == "compute":
        title += f" · {last(episode.epochs, 'share', '{:.1%}'.format)} of its compute"
        title += f", {last(episode.epochs, 'steps', '{:.0f}'.format)} steps"
    title += f" · {episode.drawn}" if episode.drawn else ""
    if not view.slots:
        return title, _none("seed")
    heads = ("slot", "stage", "blueprint", "alpha", "", "contribution", "age", "fossils")
    slots = lay_out(
        (_slot_row(episode, slot, view.modules.get(slot)) for slot in view.slots), 3, heads
    )
    return title, Group(_last_action(episode), slots)


def _last_action(episode: Episode) -> Text:
    """What was last done to a host, or refused; WAIT is no action."""
    action = episode.last_action
    if not action:
        return _none("action")
    words = [action["op"]]
    if action["blueprint"]:
        words.append(action["blueprint"])
    if action["blend"]:
        words.append(f"({action['blend']})")
    place = _place(action["slot"], action["module"])
    line = f"last action: {' '.join(words)} in {place} at epoch {action['epoch']}"
    if action["refused"]:
        line += f", refused: {action['refused']}"
    return Text(printable(line), no_wrap=True, overflow="ellipsis")


def _place(slot: str, module: str | None) -> str:
    """A slot as its host calls it; of a long name the end is shown."""
    name = module or slot
    return name if len(name) <= _PLACE else f"…{name[1 - _PLACE :]}"


def _slot_row(episode: Episode, slot: str, module: str | None) -> Sequence[RenderableType]:
    seed = episode.newest(slot)
    kept = [span for span in episode.spans if span.slot == slot and span.fate == "FOSSILIZED"]
    fossils = str(sum(span.removed is None for span in kept))
    stage = "DORMANT" if seed is None or seed.fate == "FOSSILIZED" else seed.stages[-1][0]
    shown = Text(printable(stage), STYLES.get(stage, "dim"))
    if seed is None:
        return _place(slot, module), shown, "", "", "", "never planted", "", fossils
    name = _place(slot, seed.module or module)
    blueprint = seed.blueprint or "-"
    if seed.fate:
        end = f"{seed.fate.lower()} at epoch {seed.end}"
        if seed.removed is not None:
            end += f", removed at {seed.removed}"
        return name, shown, blueprint, "", "", end, "", fossils
    if slot in episode.undecided:
        return name, shown, blueprint, "", "", "undecided at the end, left out", "", fossils
    gain = format_gain(seed.contribution, seed.standard_error)
    return (
        name,
        shown,
        blueprint,
        bar(seed.alpha),
        f"{seed.alpha:.2f}",
        gain,
        str(seed.age),
        fossils,
    )


def draw_curves(series: Series, curves: Sequence[tuple[str, str, Form, str]], height: int) -> Table:
    """Draw curves one above the other, each with its newest value and its range.

    Each is given as label, name of its column, form of its values, colour.
    """
    rows = []
    for label, name, form, style in curves:
        if values := [value for value in series.column(name) if math.isfinite(value)]:
            between = f"{form(min(values))} to {form(max(values))}"
            rows.append(
                (
                    label,
                    form(values[-1]),
                    spark(values, style, max(1, height // len(curves))),
                    between,
                )
            )
    return lay_out(rows[: max(1, height)], wide=2)


def draw_episode(moment: Moment, width: int, height: int) -> Picture:
    """The chosen host's accuracy, its twin's, and its loss, epoch by epoch."""
    if moment.episode is None or not moment.episode.epochs.rows:
        return "epoch by epoch", _none("epoch is measured")
    name = "held_out_loss" if moment.episode.epochs.last("score") is None else "score"
    curves = (
        ("accuracy grown", "accuracy", "{:.2%}".format, GREEN),
        ("accuracy twin", "twin_accuracy", "{:.2%}".format, GREY),
        (f"held-out {name.removeprefix('held_out_')}", name, "{:.4f}".format, AMBER),
        ("training loss", "train_loss", "{:.4f}".format, AMBER),
    )
    return f"host {moment.episode.host}, epoch by epoch", draw_curves(
        moment.episode.epochs, curves, height
    )


def draw_reward(moment: Moment, width: int, height: int) -> Picture:
    """Draw what the chosen host earned so far, part by part.

    Beside it stands the mean of the newest finished round.
    """
    episode, rounds = moment.episode, moment.view.rounds
    names = [
        name for name in (episode.epochs if episode else rounds).columns if name.startswith("part.")
    ]
    earned = {
        name: sum(filter(math.isfinite, episode.epochs.column(name))) if episode else 0.0
        for name in names
    }
    most = max(map(abs, earned.values()), default=0.0) or 1.0
    is_wide = width >= 50
    rows: list[Sequence[RenderableType]] = [("", "episode", "", "last round")] if is_wide else []
    for name, value in earned.items():
        more = (bar(abs(value) / most), last(rounds, name, "{:+.3f}".format)) if is_wide else ()
        rows.append((name.removeprefix("part."), f"{value:+.3f}", *more))
    body = lay_out(rows, wide=2 if is_wide else 0) if earned else _none("reward")
    return f"reward parts · sum {sum(earned.values()):+.3f}", body


def draw_rounds(moment: Moment, width: int, height: int) -> Picture:
    """Draw return, accuracy and size, the mean of all hosts, round by round."""
    curves = (
        ("return", "mean_return", "{:+.3f}".format, VIOLET),
        ("accuracy", "accuracy", "{:.2%}".format, GREEN),
        ("twins", "twin_accuracy", "{:.2%}".format, GREY),
        ("size", "params_share", "{:.2f} x".format, AMBER),
    )
    rounds = moment.view.rounds
    body = draw_curves(rounds, curves, height) if rounds.rows else _none("round is over")
    return "mean of all hosts, round by round", body


def draw_ops(moment: Moment, width: int, height: int) -> Picture:
    """Draw how often each op was chosen in this round."""
    ops = moment.view.ops
    most = max(ops.values(), default=0) or 1
    names = [*OP_NAMES, *sorted(set(ops) - set(OP_NAMES))]
    return f"ops · {sum(ops.values()):,} decisions", lay_out(
        ([n, str(ops[n]), bar(ops[n] / most)] for n in names), 2
    )


def draw_health(moment: Moment, width: int, height: int) -> Picture:
    """Draw the newest update.

    Each number has a line and a curve where there is room, else as many share a line as fit.
    """
    rounds = moment.view.rounds
    anomalies = moment.view.anomalies
    title = "PPO health"
    if anomalies:
        title += f" · {len(anomalies)} anomal{'y' if len(anomalies) == 1 else 'ies'}!"
    if not rounds.rows:
        return title, _none("update")
    heads = [name for name in rounds.columns if name.startswith("entropy.")]
    columns = [
        ("KL", "kl", "{:.4f}".format),
        ("clip", "clip_fraction", "{:.2f}".format),
        ("explained variance", "explained_variance", "{:.2f}".format),
        ("first ratio gap", "first_ratio_gap", "{:.1e}".format),
        *(
            (f"entropy {printable(name.removeprefix('entropy.'))}", name, "{:.2f}".format)
            for name in heads
        ),
    ]
    numbers = [
        (label, last(rounds, name, form), spark(rounds.column(name), VIOLET))
        for label, name, form in columns
    ]
    if height >= len(numbers):
        room = height - len(numbers)
        lines = []
        for anomaly in anomalies[-room:] if room else ():
            line = f"! round {anomaly['round']}: {anomaly['kind']} is {anomaly['value']}"
            lines.append(Text(printable(line)))
        return title, Group(lay_out(numbers, wide=2), *lines)
    items = [f"{label} {value}".replace(" ", "\xa0") for label, value, _ in numbers]
    short = "  ".join(items[:5] + [item.removeprefix("entropy\xa0") for item in items[5:]])
    return title, Text("\n".join(wrap(short, max(1, width))).replace("\xa0", " "))


def choose_lines(lines: Iterable[LogLine], wanted: str) -> list[LogLine]:
    """Return the lines that have all the words, in whatever case.

    A word may be in a line's kind, its text, or its round and host (`r5 h3`).
    """
    words = wanted.lower().split()
    return [
        line
        for line in lines
        if all(w in f"{line.kind} {_where(line)} {line.text}".lower() for w in words)
    ]


def draw_log(moment: Moment, width: int, height: int) -> Picture:
    """The newest events, one a line, the newest last."""
    log = moment.view.log
    lines = choose_lines(log, moment.wanted)
    rows = [
        ((f"{line.number:>7} ", "dim"), (f"{_where(line):<9}", GREY), line.text) for line in lines
    ]
    text = Text("\n").join(Text.assemble(*row) for row in rows)
    title = (
        f"events · filter {moment.wanted!r}: {len(lines)} of {len(log)}"
        if moment.wanted
        else "events"
    )
    return title, text or _none("event" + (" with these words" if moment.wanted else ""))


def _where(line: LogLine) -> str:
    return f"r{line.round}" + ("" if line.host is None else f" h{line.host}")
