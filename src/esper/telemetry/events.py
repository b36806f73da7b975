"""The event records.

The class name is a record's type, its fields are its schema, `str()` is one line for people.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, dataclass_transform

from esper.leyline.errors import SaveError
from esper.leyline.factored_actions import DEFAULT_SPACE, ActionSpace, look_up
from esper.telemetry.escalation import TelemetryLevel
from esper.telemetry.wording import clock, describe_drawn, format_gain

ACTION_TAKEN = "ACTION_TAKEN"
"""Type of the record of every decision, at debug; `emit_last_action` makes it of raw indices."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Event:
    """Something that happened. Every kind of event is a frozen dataclass of plain values.

    `str()` is one line for people. A kind writes it as a format in `line`, or in `__str__`.
    """

    line = ""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        return self.line.format(self)


class HostEvent(Event):
    """Something that happened to one host, after this many epochs of training."""

    host: int
    epoch: int


class SlotEvent(HostEvent):
    """Something that happened in one slot; every kind has a field `slot`."""

    # the host's own name of the module that the slot sits on
    module: str | None = field(default=None, kw_only=True)

    @property
    def site(self) -> str:
        """The slot, and the module that it sits on where that is known."""
        slot: str = self.slot  # type: ignore[attr-defined]  # each kind has it at another position
        return slot if self.module is None else f"{slot} ({self.module})"


class HostBegan(HostEvent):
    """The episode of a host began that differs from others of its task: what it has drawn."""

    seed: int
    variation: int
    drawn: dict[str, float]

    def __str__(self) -> str:
        drawn = describe_drawn(self.drawn)
        return f"epoch {self.epoch}: host {self.host} is variation {self.variation}: {drawn}"


class HostEpoch(HostEvent):
    """One epoch of one host was trained and measured; None is not measured."""

    held_out_loss: float | None
    params: int
    train_loss: float | None = None
    held_out_accuracy: float | None = None
    held_out_score: float | None = None  # where your `evaluate` returns scores instead of losses
    flops: int | None = None  # all phases, since the episode began
    steps: int | None = None  # training steps of this epoch
    share: float | None = None  # part of the episode that is over: of its epochs, or of its compute
    # where a policy is trained; the reward is what the decision before this epoch earned
    round: int | None = None
    twin_accuracy: float | None = None
    reward: float | None = None
    reward_parts: dict[str, float] | None = None

    def __str__(self) -> str:
        readings = []
        if self.held_out_loss is not None:
            readings.append(f"held-out loss {self.held_out_loss:.4f}")
        if self.held_out_score is not None:
            readings.append(f"held-out score {self.held_out_score:.4f}")
        if self.held_out_accuracy is not None:
            readings.append(f"accuracy {self.held_out_accuracy:.2%}")
        shown = ", ".join(readings) or "not measured"
        return f"epoch {self.epoch}: {shown}, {self.params:,} parameters"


class SeedMeasured(SlotEvent):
    """A live seed after an epoch; its contribution is None, not measured, before probation."""

    slot: str
    stage: str
    blueprint: str | None
    alpha: float
    age: int
    params: int
    contribution: float | None
    standard_error: float | None

    def __str__(self) -> str:
        gain = format_gain(self.contribution, self.standard_error)
        return (
            f"epoch {self.epoch}: {self.site} {self.blueprint} {self.stage}, alpha "
            f"{self.alpha:.2f}, {gain}"
        )


class ActionTaken(SlotEvent):
    """What the policy chose, and for which seed; WAIT is not recorded here."""

    op: str
    slot: str
    blueprint: str | None
    blend: str | None

    def __str__(self) -> str:
        what = f" {self.blueprint}" if self.blueprint else ""
        way = f" ({self.blend})" if self.blend else ""
        return f"epoch {self.epoch}: {self.op}{what}{way} in {self.site}"


class ActionRefused(SlotEvent):
    """An action that was not possible and was executed as WAIT."""

    op: str
    slot: str
    reason: str
    line = "epoch {0.epoch}: {0.op} in {0.site} refused: {0.reason}"


class StageChanged(SlotEvent):
    """A slot went from one stage to another."""

    slot: str
    before: str
    after: str
    blueprint: str | None
    alpha: float

    def __str__(self) -> str:
        seed = f" {self.blueprint}" if self.blueprint else ""
        return f"epoch {self.epoch}: {self.site}{seed} {self.before} -> {self.after}"


class GateJudged(SlotEvent):
    """A gate gave a verdict that ended a stage."""

    slot: str
    gate: str
    measured: float | None
    needed: str
    verdict: str
    reason: str
    line = "epoch {0.epoch}: {0.site} {0.gate} {0.verdict} ({0.reason})"


class FossilJudged(SlotEvent):
    """Late pruning kept or removed a fossil; a contribution of None is not finite.

    The newest fossil of a slot is judged first.
    """

    slot: str
    blueprint: str
    contribution: float | None
    standard_error: float | None
    is_kept: bool

    def __str__(self) -> str:
        fate = "kept" if self.is_kept else "removed"
        gain = format_gain(self.contribution, self.standard_error)
        return f"epoch {self.epoch}: fossil {self.site} {self.blueprint} {fate}, {gain}"


class RemainsMeasured(HostEvent):
    """What the end of an episode leaves: the network without its undecided seeds.

    `contributions`: by slot, what its fossils save of the held-out loss. `flops`: of all phases.
    """

    held_out_loss: float | None
    held_out_accuracy: float | None
    left_out: list[str]
    contributions: dict[str, float]
    flops: int

    def __str__(self) -> str:
        left_out = ", ".join(self.left_out)
        shown = f"without the undecided {left_out}" if left_out else "nothing was undecided"
        if self.held_out_loss is not None:
            shown += f", held-out loss {self.held_out_loss:.4f}"
        if self.held_out_accuracy is not None:
            shown += f", accuracy {self.held_out_accuracy:.2%}"
        return f"epoch {self.epoch}: host {self.host} ends: {shown}"


class HostRolledBack(HostEvent):
    """The governor rolled a host back to its last good state."""

    reason: str
    line = "epoch {0.epoch}: host {0.host} rolled back: {0.reason}"


class GrowthHint(HostEvent):
    """Advice to the user whose training loop this is."""

    text: str
    line = "epoch {0.epoch}: hint: {0.text}"


class GrowthReported(HostEvent):
    """What all that grew in a network is worth on held-out examples, and what it costs.

    It is the one event of several lines. `parts` are fossils and live seeds in the output, each
    with slot, module, blueprint, stage, params, flops, without (the mean with it switched off),
    gain and standard_error. A gain is by how much the whole is better. `measure` is loss or score.
    FLOPs are of one example forward, None if unknown; `spent` FLOPs and seconds are by phase, so
    far.
    """

    measure: str
    examples: int
    whole: float
    without_all: float
    gain: float
    standard_error: float
    parts: list[dict[str, Any]]
    params: int
    host_params: int
    flops: int | None
    host_flops: int | None
    spent: dict[str, int]
    seconds: dict[str, float]

    def __str__(self) -> str:
        lines = [
            f"epoch {self.epoch}: held-out {self.measure} {self.whole:.4f} on "
            f"{self.examples:,} examples, without all that grew {self.without_all:.4f}, "
            f"a gain of {format_gain(self.gain, self.standard_error)}"
        ]
        if self.parts:
            lines.append(
                "(this is what the network loses without what it has learnt to rely on; whether "
                "growing was worth it, garden.control() says)"
            )
        lines += [self._line_of(part) for part in self.parts]
        lines += [self._size_line(), self._cost_line()]
        return "\n  ".join(lines)

    def _line_of(self, part: dict[str, Any]) -> str:
        """One fossil or seed: whether it helps, by how much, and its size."""
        gain = part["gain"]
        error = part["standard_error"]
        if abs(gain) <= 2 * error:
            verdict = "may be chance"
        else:
            verdict = "helps" if gain > 0 else "hurts"
        name = f"{part['slot']} ({part['module']}) {part['blueprint']}, {part['stage']}"
        line = f"{name}: {verdict}, {format_gain(gain, error)}; {part['params']:,} parameters"
        if self.host_flops:
            line += f", {part['flops'] / self.host_flops:.1%} of the host's FLOPs"
        return line

    def _size_line(self) -> str:
        times_host = self.params / max(self.host_params, 1)
        line = f"parameters: {self.params:,}, {times_host:.2f} x the host's"
        if self.flops is not None and self.host_flops:
            share = self.flops / self.host_flops
            line += f"; FLOPs of an example: {self.flops:.3g}, {share:.2f} x the host's"
        return line

    def _cost_line(self) -> str:
        training = self.seconds.get("training", 0.0)
        others = sum(self.seconds.values()) - training
        line = f"time: training {clock(training)}, measuring and deciding {clock(others)}"
        if self.flops is not None and self.host_flops:
            spent = sum(self.spent.values())
            in_training = self.spent.get("training", 0)
            line += f"; FLOPs: {spent:.3g}, {in_training:.3g} of them in training"
        return line


class ArmFinished(Event):
    """One policy's episode on one host seed, with the score of the network it leaves behind."""

    arm: str
    seed: int
    epochs: int
    start_params: int
    final_params: int
    validation_accuracy: float
    test_accuracy: float
    test_loss: float
    flops: int  # all phases of training and measuring, by the ledger
    seconds: float
    germinated: int
    fossilized: int
    culled: int
    line = (
        "{0.arm} (seed {0.seed}): test accuracy {0.test_accuracy:.2%}, "
        "{0.final_params:,} parameters"
    )


class LedgerClosed(Event):
    """What one host's episode cost, phase by phase."""

    host: int
    seed: int
    peak_params: int
    flops: dict[str, int]
    examples: dict[str, int]
    seconds: dict[str, float]  # wall clock; the one field in which equal runs differ

    def __str__(self) -> str:
        return (
            f"host {self.host}: {sum(self.flops.values()):.3g} FLOPs, at most "
            f"{self.peak_params:,} parameters"
        )


class CostsBooked(Event):
    """What a run of `esper ppo` spent beside its hosts' episodes, by phase as in `LedgerClosed`.

    `what` is `twins`, once before the first round, or `learning`, after every round. Twins are told
    with what they cost when they were computed, also where they were read back from disk.
    """

    what: str
    round: int
    flops: dict[str, int]
    examples: dict[str, int]
    seconds: dict[str, float]  # wall clock; the one field in which equal runs differ

    def __str__(self) -> str:
        return f"round {self.round}: {self.what} cost {sum(self.flops.values()):.3g} FLOPs"


class RoundBegan(Event):
    """All hosts begin new episodes; what follows in this file belongs to them."""

    round: int
    line = "round {0.round} begins"


class RankTimed(Event):
    """How long one process took to play its share of a round."""

    round: int
    rank: int
    hosts: int
    seconds: float  # wall clock; the one field in which equal runs differ
    line = "round {0.round}: rank {0.rank} played {0.hosts} episodes in {0.seconds:.2f} s"


class RoundFinished(Event):
    """One round of episodes and the update after it."""

    round: int
    decisions: int  # since the beginning
    mean_return: float
    accuracy: float  # held-out, mean over hosts at the end of their episodes
    twin_accuracy: float
    params_share: float  # parameters at the end over the host's own
    reward_parts: dict[str, float]  # mean over episodes
    ops: dict[str, int]
    germinated: int
    fossilized: int
    culled: int
    refused: int
    update: dict[str, Any]  # the update's record, as plain data
    # wall clock since the update before, with its checkpoint; the one field in which equal runs
    # differ
    seconds: float
    flops: dict[str, int] = field(default_factory=dict)  # of this round's episodes and learning
    agreement: float | None = None  # share of decisions that a rule, which is imitated, makes too
    agreement_on_acts: float | None = None  # the same where the rule does not wait
    line = (
        "round {0.round}: return {0.mean_return:+.3f}, accuracy {0.accuracy:.2%} "
        "(twin {0.twin_accuracy:.2%}), "
        "{0.params_share:.2f} x parameters"
    )


class AnomalyFound(Event):
    """An update that does not look healthy."""

    round: int
    kind: str
    value: float | None  # None where it is not a finite number
    limit: float | None
    where: str
    escalated: bool  # whether debug records begin with it

    def __str__(self) -> str:
        line = f"round {self.round}: {self.kind} is {self.value}, limit {self.limit} {self.where}"
        return line.rstrip()


class BlocksCompiled(HostEvent):
    """Blocks met for the first time were compiled, for all hosts.

    No host's ledger holds these seconds.
    """

    shapes: int
    seconds: float
    line = "epoch {0.epoch}: compiled {0.shapes} shapes of blocks in {0.seconds:.1f} s"


class CheckpointSaved(Event):
    """A state that training can continue from."""

    round: int
    file: str
    line = "round {0.round}: saved {0.file}"


_MINIMAL = (RoundFinished, AnomalyFound, CheckpointSaved, ArmFinished, LedgerClosed, HostRolledBack)
SEVERITIES: dict[type[Event], TelemetryLevel] = dict.fromkeys(_MINIMAL, TelemetryLevel.MINIMAL)
"""The level from which on a kind of event is kept; all that are not listed: NORMAL."""


def _find_kinds() -> dict[str, type[Event]]:
    """Every class above that is a kind of event, by its name."""
    bases = (Event, HostEvent, SlotEvent)
    kinds = {}
    for name, value in globals().items():
        if isinstance(value, type) and issubclass(value, Event) and value not in bases:
            kinds[name] = value
    return kinds


EVENT_TYPES = _find_kinds()
"""The kinds of events by the `type` of their records."""


def finite(value: float | None) -> float | None:
    """None where there is no finite number: JSON has no other."""
    return value if value is not None and math.isfinite(value) else None


def to_record(event: Event) -> dict[str, Any]:
    """The event as plain data, ready for JSON."""
    return {"type": type(event).__name__, **vars(event)}


def from_record(record: dict[str, Any]) -> Event:
    """The event a record was made from; a record of another shape is refused."""
    values = dict(record)
    name = values.pop("type", None)
    kind = EVENT_TYPES.get(str(name))
    if kind is None or set(values) != {field.name for field in fields(kind)}:
        raise SaveError(
            f"an event record of type {name!r} with fields {sorted(values)} is not "
            "one this version knows."
        )
    return kind(**values)


def emit_last_action(
    *,
    env_id: int,
    epoch: int,
    slot_idx: int,
    blueprint_idx: int,
    blend_idx: int,
    op_idx: int,
    slot_id: str,
    masked: Mapping[str, bool],
    success: bool,
    space: ActionSpace = DEFAULT_SPACE,
) -> dict[str, Any]:
    """The record of one decision, of type ACTION_TAKEN.

    `masked` says of each head whether its mask left no choice.
    """
    op, _, blueprint, blend = look_up(space, op_idx, slot_idx, blueprint_idx, blend_idx)
    heads = ("op", "slot", "blueprint", "blend")
    return {
        "kind": "last_action",
        "env_id": env_id,
        "inner_epoch": epoch,
        "op": op,
        "slot_id": slot_id,
        "blueprint_id": blueprint,
        "blend_id": blend,
        **{f"{head}_masked": bool(masked.get(head, False)) for head in heads},
        "action_success": success,
    }
