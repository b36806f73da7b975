"""What a slot remembers of its seed, and how an epoch moves the seed to its next stage.

Plain data: no tensors, no modules, no logging.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

from esper.leyline.errors import (
    IllegalTransitionError,
    SettingError,
    UnknownNameError,
    is_number,
)
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.gates import (
    GateEvidence,
    Measurement,
    counterfactual_gate,
    ramp_gate,
    shadow_gate,
)
from esper.leyline.stages import LIVE_STAGES, TRANSITIONS, SeedStage

MIN_CULL_AGE = 1
"""Epochs a seed must train before it may be culled."""
_SIGMOID_STEEPNESS = 10.0


@dataclass(frozen=True)
class StageLengths:
    """How many epochs each of a slot's stages lasts unless a policy ends it earlier.

    Probation has no length: a seed stays on it until FOSSILIZE or CULL decides.

    >>> import esper
    >>> esper.StageLengths(ramp=3)
    StageLengths(training=0, ramp=3, embargo=3, resetting=1)
    """

    training: int = 0
    """incubation before blending; 0 blends at once, which did better in our measurements"""
    ramp: int = 1
    """epochs from alpha 0 to 1; 1 is fully blended in at once, 0 plants for good, unmeasured"""
    embargo: int = 3
    """epochs a slot stays closed after a cull"""
    resetting: int = 1
    """epochs between the embargo and the next chance"""

    def __post_init__(self) -> None:
        shortest = {"training": 0, "ramp": 0, "embargo": 0, "resetting": 0}
        for name, least in shortest.items():
            value = getattr(self, name)
            if not is_number(value, least, is_whole=True):
                raise SettingError(
                    f"StageLengths.{name} must be a whole number of at least {least}, got "
                    f"{value!r}."
                )
            object.__setattr__(self, name, int(value))
        if self.training and not self.ramp:
            raise SettingError(
                f"ramp 0 plants a seed for good, but training is {self.training}; raise ramp to 1."
            )


def ramp_alpha(blend_id: str, progress: float) -> float:
    """A seed's share of the output after `progress` (0 to 1) of its ramp.

    It is exactly 0 and exactly 1 at the ends.
    """
    if blend_id not in BLEND_IDS:
        raise UnknownNameError("blend", blend_id, BLEND_IDS)
    progress = min(max(progress, 0.0), 1.0)
    if blend_id != "sigmoid":
        return progress
    # a tangent is symmetric bit for bit, so the middle of the ramp is exactly one half
    half = _SIGMOID_STEEPNESS / 2
    rise = math.tanh(half * (progress - 0.5)) / math.tanh(half * 0.5)
    return 0.5 + 0.5 * rise


@cache
def repeated_blends(blends: tuple[str, ...], ramp: int | None) -> Mapping[str, str]:
    """Blends that raise a seed exactly as an earlier one does, each with that earlier one.

    A gate is learned, so a blend with a gate equals none without. None is a ramp of unknown length:
    no blend repeats another.

    >>> repeated_blends(("linear", "sigmoid", "gated"), ramp=1)
    {'sigmoid': 'linear'}
    >>> repeated_blends(("linear", "sigmoid", "gated"), ramp=3)
    {}
    """
    repeated: dict[str, str] = {}
    if ramp is None:
        return repeated
    first_with: dict[tuple[bool, tuple[float, ...]], str] = {}
    for blend_id in blends:
        shares = tuple(ramp_alpha(blend_id, epoch / ramp) for epoch in range(1, ramp + 1))
        first = first_with.setdefault((blend_id == "gated", shares), blend_id)
        if first != blend_id:
            repeated[blend_id] = first
    return repeated


@dataclass(frozen=True, slots=True)
class SeedState:
    """All the lifecycle knows about a slot. Snapshot = keep it; rollback = assign it."""

    stage: SeedStage = SeedStage.DORMANT
    epochs_in_stage: int = 0
    age: int = 0
    """epochs that the live seed has trained"""
    alpha: float = 0.0
    """the seed's share of the output, 0 to 1"""
    blueprint_id: str | None = None
    blend_id: str | None = None
    contribution: Measurement | None = None
    """slot on against slot off, as last measured"""
    shadow_gain: Measurement | None = None
    """seed at full strength against the host alone, as measured while it is incubated"""
    gates: tuple[GateEvidence, ...] = ()
    """the newest evidence of each gate, in the order of judging"""

    @property
    def is_live(self) -> bool:
        """Whether the slot holds a seed of its own."""
        return self.stage in LIVE_STAGES

    def advance(self, to: SeedStage) -> Self:
        """The same slot, one stage further; a move the table does not have is refused."""
        if to not in TRANSITIONS[self.stage]:
            allowed = ", ".join(stage.name for stage in sorted(TRANSITIONS[self.stage]))
            raise IllegalTransitionError(
                f"{self.stage.name} -> {to.name} is not allowed; from here: {allowed}."
            )
        if to in (SeedStage.DORMANT, SeedStage.EMBARGOED, SeedStage.RESETTING):
            return type(self)(stage=to)
        alpha = self.alpha if to is SeedStage.PROBATIONARY else float(to is SeedStage.FOSSILIZED)
        return replace(self, stage=to, epochs_in_stage=0, alpha=alpha)

    def judged(self, evidence: GateEvidence) -> Self:
        """The same with this evidence, in place of what the same gate said before."""
        others = [gate for gate in self.gates if gate.name != evidence.name]
        return replace(self, gates=(*others, evidence))

    def measured(self, contribution: Measurement) -> Self:
        """The same with a contribution, and with the judgement of the counterfactual gate."""
        return replace(self, contribution=contribution).judged(counterfactual_gate(contribution))

    def incubated(self, gain: Measurement) -> Self:
        """The same with a shadow gain; its gate judges when the stage ends."""
        return replace(self, shadow_gain=gain)


def germinate(blueprint_id: str, blend_id: str) -> SeedState:
    """A slot in which a seed has just been planted."""
    germinated = SeedState().advance(SeedStage.GERMINATED)
    return replace(germinated, blueprint_id=blueprint_id, blend_id=blend_id)


@dataclass(frozen=True, slots=True)
class _StageEnd:
    """Where a slot goes when a stage is over, and the evidence that decided, if a gate did."""

    target: SeedStage
    evidence: GateEvidence | None = None


def tick(state: SeedState, lengths: StageLengths) -> SeedState:
    """The state for the epoch that is about to be trained.

    Stages that are over end, and alpha takes its next step.
    """
    while True:
        end = _find_end(state, lengths)
        if end is None:
            break
        if end.evidence is not None:
            state = state.judged(end.evidence)
        state = state.advance(end.target)
        if end.target in (SeedStage.FOSSILIZED, SeedStage.CULLED):
            # both are seen for one epoch, so that reports show how the seed ended
            break
    if state.stage is SeedStage.DORMANT:
        return state
    epochs = state.epochs_in_stage + 1
    alpha = state.alpha
    if state.stage is SeedStage.BLENDING:
        assert state.blend_id is not None
        alpha = ramp_alpha(state.blend_id, epochs / lengths.ramp)
    return replace(state, epochs_in_stage=epochs, age=state.age + state.is_live, alpha=alpha)


def _find_end(state: SeedState, lengths: StageLengths) -> _StageEnd | None:
    """How the present stage ends now; None while it lasts."""
    epochs = state.epochs_in_stage
    match state.stage:
        case SeedStage.GERMINATED:
            return _StageEnd(SeedStage.TRAINING if lengths.ramp else SeedStage.FOSSILIZED)
        case SeedStage.TRAINING if epochs >= lengths.training:
            gate = shadow_gate(state.shadow_gain, lengths.training)
            return _StageEnd(SeedStage.BLENDING if gate.passed else SeedStage.CULLED, gate)
        case SeedStage.BLENDING:
            gate = ramp_gate(state.alpha)
            return _StageEnd(SeedStage.PROBATIONARY, gate) if gate.passed else None
        case SeedStage.FOSSILIZED if epochs >= 1:
            # an epoch is trained before the slot opens again, so that reports show the fossil
            return _StageEnd(SeedStage.DORMANT)
        case SeedStage.CULLED:
            return _StageEnd(SeedStage.EMBARGOED)
        case SeedStage.EMBARGOED if epochs >= lengths.embargo:
            return _StageEnd(SeedStage.RESETTING)
        case SeedStage.RESETTING if epochs >= lengths.resetting:
            return _StageEnd(SeedStage.DORMANT)
        case _:
            return None
