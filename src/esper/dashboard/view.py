"""What a run looks like so far:

plain data, folded from its event records one by one. No files, no drawing.
"""

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from esper.leyline.errors import EsperError, is_number, printable
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import ordered_slots
from esper.telemetry.events import ACTION_TAKEN, EVENT_TYPES, finite, from_record

LOG_LINES = 500  # Event lines that a view remembers; older ones are on disk.
_LONGEST_TEXT = 400
_DEBUG_KINDS = (ACTION_TAKEN, "UPDATE_DUMP")
Record = Mapping[str, Any]


class Series:
    """Columns of numbers of equal length; NaN is not measured.

    A column that appears late is NaN before.
    """

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.rows = 0

    def append(self, **values: float | None) -> None:
        """One row more; a value that is no number is refused before anything has changed."""
        row = array("d", [nan if value is None else value for value in values.values()])
        if list(values) != list(self.columns):
            for name in values:
                self.columns.setdefault(name, array("d", [nan]) * self.rows)
            row = array(
                "d", [dict(zip(values, row, strict=True)).get(name, nan) for name in self.columns]
            )
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.rows += 1

    def column(self, name: str) -> "array[float]":
        """All values of a column; NaN throughout where nothing has that name."""
        return self.columns.get(name) or array("d", [nan]) * self.rows

    def last(self, name: str) -> float | None:
        """The newest value; None where it was not measured."""
        return finite(self.columns[name][-1]) if name in self.columns else None

    def thinned(self, points: int) -> dict[str, list[float | None]]:
        """At most `points` rows:

        the first, the last, where a column is lowest or highest, and even steps between.
        """
        kept = range(self.rows) if self.rows <= points else sorted(self._choose(points))
        return {
            name: [finite(column[row]) for row in kept] for name, column in self.columns.items()
        }

    def _choose(self, points: int) -> set[int]:
        wanted = dict.fromkeys((self.rows - 1, 0))
        for column in self.columns.values():
            known = [row for row in range(self.rows) if isfinite(column[row])]
            wanted |= dict.fromkeys(
                extreme(known, key=column.__getitem__) for extreme in (min, max) if known
            )
        chosen = set(list(wanted)[:points])
        room = points - len(chosen)
        return chosen | {step * (self.rows - 1) // (room + 1) for step in range(1, room + 1)}


@dataclass
class SeedSpan:
    """One seed in a slot, from planting to its end.

    Epochs count those trained so far, as in events.
    """

    slot: str
    module: str | None  # the host's name of the place
    blueprint: str | None
    stages: list[tuple[str, int]] = field(
        default_factory=list
    )  # (stage, its first epoch); those behind CULLED too
    end: int | None = None
    fate: str | None = None  # the epoch it was FOSSILIZED or CULLED, and which; None is alive
    removed: int | None = None  # the epoch in which late pruning removed the fossil
    alpha: float = 0.0
    age: int = 0
    params: int = 0
    contribution: float | None = None
    standard_error: float | None = None
    readings: Series = field(default_factory=Series)  # epoch, alpha, contribution, standard_error
    verdicts: list[dict[str, Any]] = field(
        default_factory=list
    )  # gate, measured, needed, verdict, reason, epoch


@dataclass
class Episode:
    """One host's episode in one round (PPO) or run (grow)."""

    host: int
    round: int
    rank: int = 0  # whose file tells of it
    epochs: Series = field(default_factory=Series)
    """epoch, train_loss, held_out_loss, accuracy, score, twin_accuracy, params, flops, steps,
    share, reward, part.*
    """
    spans: list[SeedSpan] = field(default_factory=list)
    actions: int = 0  # those that were refused included
    acted: int = -1  # epoch of the newest action
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # epoch, reason
    unborn: dict[str, list[dict[str, Any]]] = field(
        default_factory=dict
    )  # slot -> verdicts before a seed germinated

    @property
    def has_begun(self) -> bool:
        """Whether anything is known of it."""
        return bool(self.epochs.rows or self.spans or self.actions or self.rollbacks or self.unborn)

    def newest(self, slot: str) -> SeedSpan | None:
        """The last seed that was planted in a slot, alive or not."""
        return next((span for span in reversed(self.spans) if span.slot == slot), None)

    def alive(self, slot: str) -> SeedSpan | None:
        span = self.newest(slot)
        return span if span is not None and span.end is None else None


@dataclass(frozen=True)
class LogLine:
    number: int  # counts all events of the run from 0
    kind: str
    round: int
    host: int | None
    text: str


@dataclass
class RunView:
    """All that screens and reports draw.

    Files of several ranks may be folded in any order between them.
    """

    kind: str  # ppo or run
    config: dict[str, Any]
    slots: list[str] = field(default_factory=list)  # slot ids seen so far, in execution order
    round: int = 0  # the round that is being played; 0 in a run without rounds
    rounds: Series = field(default_factory=Series)
    """round, decisions, mean_return, accuracy, twin_accuracy, params_share, germinated, fossilized,
    culled, refused, seconds, part.NAME, op.NAME, and of the update: kl, clip_fraction,
    explained_variance, value_loss, policy_loss, first_ratio_gap, entropy.HEAD, clip.HEAD"""
    episodes: dict[int, Episode] = field(default_factory=dict)  # the newest of each host
    results: list[dict[str, Any]] = field(default_factory=list)  # records of ArmFinished
    ledgers: list[dict[str, Any]] = field(default_factory=list)  # of LedgerClosed
    anomalies: list[dict[str, Any]] = field(default_factory=list)  # of AnomalyFound
    worth: list[dict[str, Any]] = field(default_factory=list)  # of GrowthReported
    events: int = 0
    unknown: int = 0  # records folded, and those of them that were not understood
    begun: dict[int, int] = field(default_factory=dict)  # rank -> the round that it plays
    chosen: defaultdict[int, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # rank -> ops so far
    closed: tuple[int, dict[str, int]] = (-1, {})  # the newest finished round and its ops
    newest: deque[tuple[int, int, Record]] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    """number, round and record of the newest events"""

    @property
    def ops(self) -> Counter[str]:
        """Ops of the current round, WAIT included."""
        if self.closed[0] == self.round:
            return Counter(self.closed[1])
        return sum(
            (self.chosen[rank] for rank, lived in self.begun.items() if lived == self.round),
            Counter(),
        )

    @property
    def log(self) -> list[LogLine]:
        """The newest events in words.

        Most fall out of it before somebody looks, so they are worded only then.
        """
        return [self._word(*event) for event in self.newest]

    def fold(self, record: Record, rank: int = 0) -> None:
        """Take in one record; one that is not understood is only counted."""
        kind = record.get("type")
        try:
            if not is_sound(record):
                raise ValueError(kind)
            if of_host := OF_HOST.get(kind):
                of_host(self, self._episode(record, rank), record, record["epoch"])
            elif of_run := OF_RUN.get(kind):
                of_run(self, record, rank)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
            self.unknown += 1
            record = {"type": str(kind)[:_LONGEST_TEXT]}
        self.newest.append((self.events, self.begun.get(rank, 0), record))
        self.events += 1

    def enter(self, number: int, rank: int) -> None:
        """All hosts of a rank begin new episodes; one that was not there in its last round does
        not.
        """
        self.begun[rank], self.chosen[rank] = number, Counter()
        self.round = max(self.begun.values())
        others = {host: episode for host, episode in self.episodes.items() if episode.rank != rank}
        own = [
            host
            for host, episode in self.episodes.items()
            if episode.rank == rank and episode.has_begun
        ]
        self.episodes = others | {host: Episode(host, number, rank) for host in own}

    def _episode(self, record: Record, rank: int) -> Episode:
        if (slot := record.get("slot")) is not None and slot not in self.slots:
            self.slots = list(ordered_slots([*self.slots, slot]))
        if rank not in self.begun:
            self.enter(0, rank)
        host, lived = record["host"], self.begun[rank]
        episode = self.episodes.get(host)
        if episode is None or (
            episode.rank != rank and episode.round <= lived
        ):  # hosts may change their rank
            episode = self.episodes[host] = Episode(host, lived, rank)
        return (
            episode if episode.rank == rank else Episode(host, lived, rank)
        )  # older than what is known

    def _word(self, number: int, lived: int, record: Record) -> LogLine:
        kind, host = record["type"], record.get("host", record.get("env_id"))
        try:
            text = str(from_record(dict(record))).partition("\n")[0]
        except (EsperError, ArithmeticError, LookupError, TypeError, ValueError):
            text = (
                f"{record.get('op', '')} {record.get('slot_id', '')}".strip()
                or "not put into words"
            )
        host = host if isinstance(host, int) else None
        return LogLine(number, printable(kind), lived, host, printable(text[:_LONGEST_TEXT]))


def _options(annotation: Any) -> set[type]:
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = {get_origin(option) or option for option in options}
    return kinds | {int} if float in kinds else kinds


_FIELDS = {
    name: {"type": {str}} | {field: _options(hint) for field, hint in get_type_hints(event).items()}
    for name, event in EVENT_TYPES.items()
}


def is_sound(record: Record) -> bool:
    """Whether a record has the fields of its type, each with a value that may be there."""
    kind = record.get("type")
    if (fields := _FIELDS.get(str(kind))) is None or record.keys() != fields.keys():
        return kind in _DEBUG_KINDS
    return all(type(value) in fields[name] for name, value in record.items())


def _host_epoch(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    parts = {f"part.{name}": value for name, value in (record["reward_parts"] or {}).items()}
    names = (
        "train_loss",
        "held_out_loss",
        "twin_accuracy",
        "params",
        "flops",
        "steps",
        "share",
        "reward",
    )
    held_out = {name: record[f"held_out_{name}"] for name in ("accuracy", "score")}
    episode.epochs.append(
        epoch=epoch, **held_out, **{name: record[name] for name in names}, **parts
    )
    if epoch > 1 and episode.acted != epoch - 1:
        view.chosen[episode.rank]["WAIT"] += 1


def _action(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    episode.actions += 1
    episode.acted = epoch
    view.chosen[episode.rank][record["op"]] += 1


def _stage(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    slot, stage = record["slot"], record["after"]
    span = episode.newest(slot)
    if stage in ("EMBARGOED", "RESETTING", "DORMANT"):
        if span is not None and span.fate == "CULLED":
            span.stages.append((stage, epoch))
        return
    is_end = stage in ("FOSSILIZED", "CULLED")
    if span is None or stage == "GERMINATED" or (span.end is not None and not is_end):
        span = _plant(episode, record)
    span.stages.append((stage, epoch))
    span.alpha = record["alpha"]
    if is_end:  # a rollback culls what had been fossilized since the state that it goes back to
        span.end, span.fate = epoch, stage


def _plant(episode: Episode, record: Record) -> SeedSpan:
    slot = record["slot"]
    episode.spans.append(
        SeedSpan(slot, record["module"], record["blueprint"], verdicts=episode.unborn.pop(slot, []))
    )
    return episode.spans[-1]


def _gate(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    names = ("gate", "needed", "verdict", "reason")
    verdict = {
        "epoch": epoch,
        "measured": finite(record["measured"]),
        **{name: record[name] for name in names},
    }
    span = episode.alive(record["slot"])
    (span.verdicts if span else episode.unborn.setdefault(record["slot"], [])).append(verdict)


def _seed(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    if (span := episode.alive(record["slot"])) is None:
        span = _plant(episode, record)
        span.stages.append((record["stage"], epoch))
    gain, error = finite(record["contribution"]), finite(record["standard_error"])
    span.readings.append(
        epoch=epoch, alpha=record["alpha"], contribution=gain, standard_error=error
    )
    span.alpha, span.age, span.params = record["alpha"], record["age"], record["params"]
    span.contribution, span.standard_error = gain, error


def _fossil(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    """Give a verdict of late pruning to the fossil that it is about.

    A slot reports its newest fossil first, so this is the newest one without a verdict of this
    epoch. Whether it stays is the event's own `is_kept`: the screen repeats no rule.
    """
    for span in reversed(episode.spans):
        if _awaits_verdict(span, record, epoch):
            break
    else:
        return
    contribution = finite(record["contribution"])
    standard_error = finite(record["standard_error"])
    if contribution is None or standard_error is None:
        reason = "not measured"
    else:
        reason = f"contribution {contribution:+.4f} ± {standard_error:.4f}"
    is_kept = record["is_kept"]
    span.verdicts.append(
        {
            "epoch": epoch,
            "measured": contribution,
            "reason": reason,
            "gate": "LATE",
            "needed": f"contribution above {_least_gain(view.config)}",
            "verdict": "passed" if is_kept else "failed",
        }
    )
    span.contribution = contribution
    span.standard_error = standard_error
    span.removed = None if is_kept else epoch


def _awaits_verdict(span: SeedSpan, record: Record, epoch: int) -> bool:
    """Whether a span is a fossil as the record names it, and not judged in this epoch yet."""
    is_fossil = span.fate == "FOSSILIZED" and span.removed is None
    is_named = span.slot == record["slot"] and span.blueprint == record["blueprint"]
    is_judged = any(
        verdict["gate"] == "LATE" and verdict["epoch"] == epoch for verdict in span.verdicts
    )
    return is_fossil and is_named and not is_judged


def _least_gain(config: Mapping[str, Any]) -> str:
    """What a fossil must gain to stay, as the run folder records it.

    `esper.grow` writes its `GrowthSettings` down. The commands have no such option, so their hosts
    have the default.
    """
    settings = config.get("settings")
    if not isinstance(settings, dict):
        return f"{GrowthSettings.least_gain:g}"
    least_gain = settings.get("least_gain")
    return f"{least_gain:g}" if is_number(least_gain, 0) else "least_gain, which is not recorded"


def _round_finished(view: RunView, record: Record, rank: int) -> None:
    update, number = record["update"], record["round"]
    heads = update.get("heads") or {}
    gaps = [gap for gap in (update.get("first_ratio_gap") or {}).values() if gap is not None]
    view.rounds.append(
        **{name: value for name, value in record.items() if not isinstance(value, dict | str)},
        **{f"part.{name}": value for name, value in record["reward_parts"].items()},
        **{f"op.{name}": count for name, count in record["ops"].items()},
        kl=update.get("approx_kl"),
        **{
            name: update.get(name)
            for name in ("clip_fraction", "explained_variance", "value_loss", "policy_loss")
        },
        first_ratio_gap=max(gaps, default=None),
        **{f"entropy.{name}": head["entropy"] for name, head in heads.items()},
        **{f"clip.{name}": head["clip_fraction"] for name, head in heads.items()},
    )
    view.closed = (number, dict(record["ops"]))
    view.begun[rank] = number  # at the level `minimal` nothing said that it began
    view.round = max(view.begun.values())


def _ledger(view: RunView, record: Record, rank: int) -> None:
    for costs in (record["flops"], record["examples"], record["seconds"]):
        array("d", costs.values())  # refuses what is no number
    view.ledgers.append(dict(record))


OF_HOST: dict[Any, Callable[[RunView, Episode, Record, int], None]] = {
    "HostEpoch": _host_epoch,
    "ActionTaken": _action,
    "ActionRefused": _action,
    "StageChanged": _stage,
    "GateJudged": _gate,
    "SeedMeasured": _seed,
    "FossilJudged": _fossil,
    "GrowthReported": lambda view, episode, record, epoch: view.worth.append(dict(record)),
    "HostRolledBack": lambda view, own, record, at: own.rollbacks.append(
        {"epoch": at, "reason": record["reason"]}
    ),
}
OF_RUN: dict[Any, Callable[[RunView, Record, int], None]] = {
    "RoundBegan": lambda view, record, rank: view.enter(record["round"], rank),
    "RoundFinished": _round_finished,
    "ArmFinished": lambda view, record, rank: view.results.append(dict(record)),
    "LedgerClosed": _ledger,
    "AnomalyFound": lambda view, record, rank: view.anomalies.append(dict(record)),
}
