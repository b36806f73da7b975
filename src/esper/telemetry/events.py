"""The event records. The class name is a record's type, its fields are its schema, `str()` is one line for people."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from esper.leyline.errors import SaveError
from esper.telemetry.escalation import TelemetryLevel


@dataclass(frozen=True, slots=True)
class HostEpoch:
    """One host after an epoch.

    In all events `epoch` is the number of epochs trained so far, so what is decided after an epoch has its number.
    """

    host: int
    epoch: int
    held_out_loss: float | None
    params: int
    train_loss: float | None = None
    held_out_accuracy: float | None = None
    held_out_score: float | None = None
    """where your own `evaluate` returns scores instead of losses"""
    flops: int | None = None
    """all phases, since the episode began"""
    round: int | None = None
    """where a policy is trained; the reward is what the decision before this epoch earned"""
    twin_accuracy: float | None = None
    reward: float | None = None
    reward_parts: dict[str, float] | None = None

    def __str__(self) -> str:
        known = (
            ("held-out loss", self.held_out_loss, ".4f"),
            ("held-out score", self.held_out_score, ".4f"),
            ("accuracy", self.held_out_accuracy, ".2%"),
        )
        said = [f"{name} {format(value, how)}" for name, value, how in known if value is not None]
        return f"epoch {self.epoch}: {', '.join(said) or 'not measured'}, {self.params:,} parameters"


@dataclass(frozen=True, slots=True)
class SeedMeasured:
    """A live seed after an epoch; a contribution of None is not measured."""

    host: int
    epoch: int
    slot: str
    stage: str
    blueprint: str | None
    alpha: float
    age: int
    params: int
    contribution: float | None
    standard_error: float | None

    def __str__(self) -> str:
        known = self.contribution is not None and self.standard_error is not None
        gain = f"{self.contribution:+.4f} ± {self.standard_error:.4f}" if known else "not measured"
        return f"epoch {self.epoch}: {self.slot} {self.blueprint} {self.stage}, alpha {self.alpha:.2f}, {gain}"


@dataclass(frozen=True, slots=True)
class ActionTaken:
    """What the policy chose; WAIT is not recorded here."""

    host: int
    epoch: int
    op: str
    slot: str
    blueprint: str | None
    blend: str | None

    def __str__(self) -> str:
        what = f" {self.blueprint} ({self.blend})" if self.blueprint else ""
        return f"epoch {self.epoch}: {self.op}{what} in {self.slot}"


@dataclass(frozen=True, slots=True)
class ActionRefused:
    """An action that was not possible and was executed as WAIT."""

    host: int
    epoch: int
    op: str
    slot: str
    reason: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.op} in {self.slot} refused: {self.reason}"


@dataclass(frozen=True, slots=True)
class StageChanged:
    """A slot moved along its lifecycle."""

    host: int
    epoch: int
    slot: str
    before: str
    after: str
    blueprint: str | None
    alpha: float

    def __str__(self) -> str:
        seed = f" {self.blueprint}" if self.blueprint else ""
        return f"epoch {self.epoch}: {self.slot}{seed} {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class GateJudged:
    """A gate gave a verdict that ended a stage."""

    host: int
    epoch: int
    slot: str
    gate: str
    measured: float | None
    needed: str
    verdict: str
    reason: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.slot} {self.gate} {self.verdict} ({self.reason})"


@dataclass(frozen=True, slots=True)
class HostRolledBack:
    """The governor brought a host back to its last good state."""

    host: int
    epoch: int
    reason: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}: host {self.host} rolled back: {self.reason}"


@dataclass(frozen=True, slots=True)
class GrowthHint:
    """Advice to whoever runs the training loop."""

    host: int
    epoch: int
    text: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}: hint: {self.text}"


@dataclass(frozen=True, slots=True)
class ArmFinished:
    """One policy's episode on one host seed, with the score of the network it leaves behind."""

    arm: str
    seed: int
    epochs: int
    start_params: int
    final_params: int
    validation_accuracy: float
    test_accuracy: float
    test_loss: float
    flops: int
    """all phases of training and measuring, by the ledger"""
    seconds: float
    germinated: int
    fossilized: int
    culled: int

    def __str__(self) -> str:
        return (
            f"{self.arm} (seed {self.seed}): test accuracy {self.test_accuracy:.2%}, {self.final_params:,} parameters"
        )


@dataclass(frozen=True, slots=True)
class LedgerClosed:
    """What one host's episode cost, phase by phase."""

    host: int
    seed: int
    peak_params: int
    flops: dict[str, int]
    examples: dict[str, int]
    seconds: dict[str, float]
    """wall clock; the one field in which equal runs differ"""

    def __str__(self) -> str:
        whole = sum(self.flops.values())
        return f"host {self.host}: {whole:.3g} FLOPs, at most {self.peak_params:,} parameters"


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """All hosts begin new episodes; what follows in this file belongs to them."""

    round: int

    def __str__(self) -> str:
        return f"round {self.round} begins"


@dataclass(frozen=True, slots=True)
class RankTimed:
    """How long one process took to live its share of a round."""

    round: int
    rank: int
    hosts: int
    seconds: float
    """wall clock; the one field in which equal runs differ"""

    def __str__(self) -> str:
        return f"round {self.round}: rank {self.rank} lived {self.hosts} episodes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """One round of episodes and the update after it."""

    round: int
    decisions: int
    """since the beginning"""
    mean_return: float
    accuracy: float
    """held-out, mean over hosts at the end of their episodes"""
    twin_accuracy: float
    params_share: float
    """parameters at the end over the host's own"""
    reward_parts: dict[str, float]
    """mean over episodes"""
    ops: dict[str, int]
    germinated: int
    fossilized: int
    culled: int
    refused: int
    update: dict[str, Any]
    """the update's record, as plain data"""
    seconds: float
    """wall clock since the update before, its checkpoint included; the one field in which equal runs differ"""

    def __str__(self) -> str:
        return (
            f"round {self.round}: return {self.mean_return:+.3f}, accuracy {self.accuracy:.2%} "
            f"(twin {self.twin_accuracy:.2%}), {self.params_share:.2f} x parameters"
        )


@dataclass(frozen=True, slots=True)
class AnomalyFound:
    """An update that does not look healthy."""

    round: int
    kind: str
    value: float | None
    """None where it is not a finite number"""
    limit: float | None
    where: str
    escalated: bool
    """whether debug records begin with it"""

    def __str__(self) -> str:
        return f"round {self.round}: {self.kind} is {self.value}, limit {self.limit} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A state that training can go on from."""

    round: int
    file: str

    def __str__(self) -> str:
        return f"round {self.round}: saved {self.file}"


Event = (
    AnomalyFound
    | ArmFinished
    | CheckpointSaved
    | HostEpoch
    | LedgerClosed
    | RankTimed
    | RoundBegan
    | RoundFinished
    | SeedMeasured
    | ActionTaken
    | ActionRefused
    | StageChanged
    | GateJudged
    | GrowthHint
    | HostRolledBack
)
SEVERITIES: dict[type, TelemetryLevel] = {
    RoundFinished: TelemetryLevel.MINIMAL,
    AnomalyFound: TelemetryLevel.MINIMAL,
    CheckpointSaved: TelemetryLevel.MINIMAL,
    ArmFinished: TelemetryLevel.MINIMAL,
    LedgerClosed: TelemetryLevel.MINIMAL,
    HostRolledBack: TelemetryLevel.MINIMAL,
}
"""What is kept at a lower level than `normal`; all other events are `normal`."""
EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__args__}


def finite(value: float | None) -> float | None:
    """None where there is no finite number: JSON has no other."""
    return value if value is not None and math.isfinite(value) else None


def to_record(event: Event) -> dict[str, Any]:
    """The event as plain data, ready for JSON."""
    return {"type": type(event).__name__, **asdict(event)}


def from_record(record: dict[str, Any]) -> Event:
    """The event a record was made from; a record of another shape is refused."""
    values = dict(record)
    name = values.pop("type", None)
    cls = EVENT_TYPES.get(str(name))
    if cls is None or set(values) != {field.name for field in fields(cls)}:
        raise SaveError(f"an event record of type {name!r} with fields {sorted(values)} is not one this version knows.")
    return cls(**values)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
