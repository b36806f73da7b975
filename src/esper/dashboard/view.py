"""What a run looks like so far: plain data, folded from its event records one by one.

No files, no drawing.
"""

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from esper.dashboard.episode import Episode, SeedSpan, StageStart
from esper.dashboard.series import Series
from esper.dashboard.soundness import Record, is_sound
from esper.leyline.errors import EsperError, is_number, printable
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import ordered_slots
from esper.telemetry.events import finite, from_record
from esper.telemetry.wording import describe_drawn

LOG_LINES = 500
"""Event lines that a view remembers; older ones are on disk."""

_LONGEST_TEXT = 400
_COSTS = ("flops", "examples", "seconds")


class NumberedRecord(NamedTuple):
    """A record with its number among all of the run, and the round in which it was written."""

    number: int
    round: int
    record: Record


class FinishedRound(NamedTuple):
    """A round that is over, and how often each op was chosen in it."""

    round: int
    ops: dict[str, int]


@dataclass(frozen=True)
class LogLine:
    """One event in words."""

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
    modules: dict[str, str] = field(default_factory=dict)  # slot id -> the host's own name
    round: int = 0  # the round that is being played; 0 in a run without rounds
    rounds: Series = field(default_factory=Series)
    """round, decisions, mean_return, accuracy, twin_accuracy, params_share, germinated, fossilized,
    culled, refused, seconds, part.NAME, op.NAME, and of the update: kl, clip_fraction,
    explained_variance, value_loss, policy_loss, first_ratio_gap, entropy.HEAD, clip.HEAD
    """
    episodes: dict[int, Episode] = field(default_factory=dict)  # the newest of each host
    results: list[dict[str, Any]] = field(default_factory=list)  # records of ArmFinished
    ledgers: list[dict[str, Any]] = field(default_factory=list)  # of LedgerClosed
    is_harvested: bool = False  # whether the newest ledger is newer than the newest epoch
    # of a taught policy: what the run spent on -> phase -> FLOPs, examples and seconds so far
    spent: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    bookings: int = 0  # records that were added to `spent`
    anomalies: list[dict[str, Any]] = field(default_factory=list)  # of AnomalyFound
    worth: list[dict[str, Any]] = field(default_factory=list)  # of GrowthReported
    events: int = 0  # records folded
    unknown: int = 0  # those of them that were not understood
    begun: dict[int, int] = field(default_factory=dict)  # rank -> the round that it plays
    # rank -> ops chosen so far in the round that it plays
    chosen: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # the newest round that is over
    closed: FinishedRound = field(default_factory=lambda: FinishedRound(round=-1, ops={}))
    newest: deque[NumberedRecord] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    @property
    def ops(self) -> Counter[str]:
        """Ops of the current round, WAIT included."""
        if self.closed.round == self.round:
            return Counter(self.closed.ops)
        ops: Counter[str] = Counter()
        for rank, number in self.begun.items():
            if number == self.round:
                ops += self.chosen[rank]
        return ops

    @property
    def log(self) -> list[LogLine]:
        """The newest events in words.

        Most fall out of it before a screen shows them, so they are worded only here.
        """
        return [_word(event) for event in self.newest]

    def fold(self, record: Record, rank: int = 0) -> None:
        """Take in one record; one that is not understood is only counted."""
        kind = record.get("type")
        try:
            if not is_sound(record):
                raise ValueError(f"a record of type {kind!r} does not have the fields of its type")
            if kind in OF_HOST:
                episode = self._episode(record, rank)
                OF_HOST[kind](self, episode, record, record["epoch"])
            elif kind in OF_RUN:
                OF_RUN[kind](self, record, rank)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
            self.unknown += 1
            record = {"type": str(kind)[:_LONGEST_TEXT]}
        self.newest.append(NumberedRecord(self.events, self.begun.get(rank, 0), record))
        self.events += 1

    def enter(self, number: int, rank: int) -> None:
        """Begin new episodes for all hosts of a rank.

        A host that was not there in the rank's last round gets none.
        """
        self.begun[rank] = number
        self.chosen[rank] = Counter()
        self.round = max(self.begun.values())
        episodes = {}
        renewed = {}
        for host, episode in self.episodes.items():
            if episode.rank != rank:
                episodes[host] = episode
            elif episode.has_begun:
                renewed[host] = Episode(host, number, rank)
        self.episodes = episodes | renewed

    def _episode(self, record: Record, rank: int) -> Episode:
        """Find the episode that a record is of; a slot that is new is noted on the way."""
        slot = record.get("slot")
        if slot is not None and slot not in self.slots:
            self.slots = list(ordered_slots([*self.slots, slot]))
        module = record.get("module")
        if slot is not None and module:
            self.modules[slot] = module
        if rank not in self.begun:
            self.enter(0, rank)
        host = record["host"]
        number = self.begun[rank]
        episode = self.episodes.get(host)
        if episode is not None and episode.rank == rank:
            return episode
        newest = Episode(host, number, rank)
        # a host may change its rank; a file that is read late is older than what is known
        if episode is None or episode.round <= number:
            self.episodes[host] = newest
        return newest


def _word(event: NumberedRecord) -> LogLine:
    record = event.record
    try:
        text = str(from_record(dict(record))).partition("\n")[0]
    except (EsperError, ArithmeticError, LookupError, TypeError, ValueError):
        text = f"{record.get('op', '')} {record.get('slot_id', '')}".strip() or "not put into words"
    host = record.get("host", record.get("env_id"))
    return LogLine(
        number=event.number,
        kind=printable(record["type"]),
        round=event.round,
        host=host if isinstance(host, int) else None,
        text=printable(text[:_LONGEST_TEXT]),
    )


# -- what each kind of record changes --------------------------------------------------------------


def _began(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    episode.drawn = f"variation {record['variation']}: {describe_drawn(record['drawn'])}"


def _host_epoch(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    view.is_harvested = False
    parts = record["reward_parts"] or {}
    episode.epochs.append(
        epoch=epoch,
        accuracy=record["held_out_accuracy"],
        score=record["held_out_score"],
        train_loss=record["train_loss"],
        held_out_loss=record["held_out_loss"],
        twin_accuracy=record["twin_accuracy"],
        params=record["params"],
        flops=record["flops"],
        steps=record["steps"],
        share=record["share"],
        reward=record["reward"],
        **{f"part.{name}": value for name, value in parts.items()},
    )
    if epoch > 1 and episode.acted != epoch - 1:
        view.chosen[episode.rank]["WAIT"] += 1


def _action(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    episode.actions += 1
    episode.acted = epoch
    episode.last_action = {
        "epoch": epoch,
        "op": record["op"],
        "slot": record["slot"],
        "module": record["module"],
        "blueprint": record.get("blueprint"),
        "blend": record.get("blend"),
        "refused": record.get("reason"),
    }
    view.chosen[episode.rank][record["op"]] += 1


def _stage(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    stage = record["after"]
    span = episode.newest(record["slot"])
    if stage in ("EMBARGOED", "RESETTING", "DORMANT"):
        if span is not None and span.fate == "CULLED":
            span.stages.append(StageStart(stage, epoch))
        return
    is_end = stage in ("FOSSILIZED", "CULLED")
    if span is None or stage == "GERMINATED" or (span.end is not None and not is_end):
        span = _plant(episode, record)
    span.stages.append(StageStart(stage, epoch))
    span.alpha = record["alpha"]
    # a rollback culls what had been fossilized since the state that it goes back to
    if is_end:
        span.end = epoch
        span.fate = stage


def _plant(episode: Episode, record: Record) -> SeedSpan:
    slot = record["slot"]
    span = SeedSpan(
        slot=slot,
        module=record["module"],
        blueprint=record["blueprint"],
        verdicts=episode.unborn.pop(slot, []),
    )
    episode.spans.append(span)
    return span


def _gate(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    verdict = {
        "epoch": epoch,
        "measured": finite(record["measured"]),
        "gate": record["gate"],
        "needed": record["needed"],
        "verdict": record["verdict"],
        "reason": record["reason"],
    }
    span = episode.alive(record["slot"])
    if span is None:
        episode.unborn.setdefault(record["slot"], []).append(verdict)
    else:
        span.verdicts.append(verdict)


def _seed(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    span = episode.alive(record["slot"])
    if span is None:
        span = _plant(episode, record)
        span.stages.append(StageStart(record["stage"], epoch))
    contribution = finite(record["contribution"])
    standard_error = finite(record["standard_error"])
    span.readings.append(
        epoch=epoch,
        alpha=record["alpha"],
        contribution=contribution,
        standard_error=standard_error,
    )
    span.alpha = record["alpha"]
    span.age = record["age"]
    span.params = record["params"]
    span.contribution = contribution
    span.standard_error = standard_error


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


def _rollback(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    episode.rollbacks.append({"epoch": epoch, "reason": record["reason"]})


def _remains(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    """Note what the end of an episode left out."""
    episode.undecided = [str(slot_id) for slot_id in record["left_out"]]


def _report(view: RunView, episode: Episode, record: Record, epoch: int) -> None:
    view.worth.append(dict(record))


def _round_began(view: RunView, record: Record, rank: int) -> None:
    view.enter(record["round"], rank)


def _round_finished(view: RunView, record: Record, rank: int) -> None:
    update = record["update"]
    heads = update.get("heads") or {}
    gaps = [gap for gap in (update.get("first_ratio_gap") or {}).values() if gap is not None]
    numbers = {name: value for name, value in record.items() if not isinstance(value, dict | str)}
    view.rounds.append(
        **numbers,
        **{f"part.{name}": value for name, value in record["reward_parts"].items()},
        **{f"op.{name}": count for name, count in record["ops"].items()},
        kl=update.get("approx_kl"),
        clip_fraction=update.get("clip_fraction"),
        explained_variance=update.get("explained_variance"),
        value_loss=update.get("value_loss"),
        policy_loss=update.get("policy_loss"),
        first_ratio_gap=max(gaps, default=None),
        **{f"entropy.{name}": head["entropy"] for name, head in heads.items()},
        **{f"clip.{name}": head["clip_fraction"] for name, head in heads.items()},
    )
    view.closed = FinishedRound(round=record["round"], ops=dict(record["ops"]))
    # at the level `minimal` no event says that it began
    view.begun[rank] = record["round"]
    view.round = max(view.begun.values())


def _arm_finished(view: RunView, record: Record, rank: int) -> None:
    view.results.append(dict(record))


def _ledger(view: RunView, record: Record, rank: int) -> None:
    _require_numbers(record)
    view.ledgers.append(dict(record))
    view.is_harvested = True
    if view.kind == "ppo":
        _spend(view, "episodes", record)


def _costs_booked(view: RunView, record: Record, rank: int) -> None:
    _require_numbers(record)
    _spend(view, record["what"], record)


def _require_numbers(record: Record) -> None:
    for name in _COSTS:
        array("d", record[name].values())  # refuses what is no number


def _spend(view: RunView, what: str, record: Record) -> None:
    """Add the costs of a record to what the run spent on something, phase by phase."""
    phases = view.spent.setdefault(what, {})
    for name in _COSTS:
        for phase, cost in record[name].items():
            row = phases.setdefault(phase, dict.fromkeys(_COSTS, 0.0))
            row[name] += cost
    view.bookings += 1


def _anomaly(view: RunView, record: Record, rank: int) -> None:
    view.anomalies.append(dict(record))


OF_HOST: dict[Any, Callable[[RunView, Episode, Record, int], None]] = {
    "HostBegan": _began,
    "HostEpoch": _host_epoch,
    "ActionTaken": _action,
    "ActionRefused": _action,
    "StageChanged": _stage,
    "GateJudged": _gate,
    "SeedMeasured": _seed,
    "FossilJudged": _fossil,
    "GrowthReported": _report,
    "HostRolledBack": _rollback,
    "RemainsMeasured": _remains,
}
"""Kind of record -> what it changes in the view, in its host's episode, at its epoch."""

OF_RUN: dict[Any, Callable[[RunView, Record, int], None]] = {
    "RoundBegan": _round_began,
    "RoundFinished": _round_finished,
    "ArmFinished": _arm_finished,
    "LedgerClosed": _ledger,
    "CostsBooked": _costs_booked,
    "AnomalyFound": _anomaly,
}
"""Kind of record -> what it changes in the view, for a record of this rank."""
