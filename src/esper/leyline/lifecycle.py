"""What the life of a seed looks like and how an epoch moves it forward.

Plain data: no tensors, no modules, no logging.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from esper.leyline.errors import IllegalTransitionError, SettingError, UnknownNameError
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.gates import (
    GateEvidence,
    Measurement,
    counterfactual_gate,
    ramp_gate,
    shadow_gate,
)
from esper.leyline.stages import LIVE_STAGES, TRANSITIONS, SeedStage

MIN_CULL_AGE = 1  # Epochs a seed must train before it may be culled.
_SIGMOID_STEEPNESS = 10.0


@dataclass(frozen=True)
class StageLengths:
    """How many epochs each stage of a seed's life lasts unless a policy ends it earlier.

    >>> import esper
    >>> esper.StageLengths(ramp=3)
    StageLengths(training=0, ramp=3, probation=1, embargo=3, resetting=1)
    """

    # incubation before blending; 0 starts to blend at once, which did better in our measurements
    training: int = 0
    # epochs from alpha 0 to 1; 1 is fully blended in from the first epoch, 0 kept at once,
    # unmeasured
    ramp: int = 1
    probation: int = 1  # measured epochs at full strength before a seed is kept
    embargo: int = 3  # epochs a slot stays closed after a cull
    resetting: int = 1  # epochs between embargo and the next chance

    def __post_init__(self) -> None:
        for name, least in (
            ("training", 0),
            ("ramp", 0),
            ("probation", 1),
            ("embargo", 0),
            ("resetting", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SettingError(
                    f"StageLengths.{name} must be a whole number of at least {least}, "
                    f"got {value!r}."
                )
        if self.training and not self.ramp:
            raise SettingError(
                f"ramp 0 keeps a seed at once, but training is {self.training}; raise ramp to 1."
            )


def ramp_alpha(blend_id: str, progress: float) -> float:
    """A seed's share of the output after `progress` (0 to 1) of its ramp; exactly 0 and 1 at the
    ends.
    """
    if blend_id not in BLEND_IDS:
        raise UnknownNameError("blend", blend_id, BLEND_IDS)
    progress = min(max(progress, 0.0), 1.0)
    if blend_id != "sigmoid" or progress in (0.0, 1.0):
        return progress
    low, middle, high = (
        1.0 / (1.0 + math.exp(-_SIGMOID_STEEPNESS * x)) for x in (-0.5, progress - 0.5, 0.5)
    )
    return (middle - low) / (high - low)


@dataclass(frozen=True, slots=True)
class SeedState:
    """All the lifecycle knows about a slot. Snapshot = keep it; rollback = assign it."""

    stage: SeedStage = SeedStage.DORMANT
    epochs_in_stage: int = 0
    age: int = 0
    alpha: float = 0.0
    blueprint_id: str | None = None
    blend_id: str | None = None
    contribution: Measurement | None = None
    shadow_gain: Measurement | None = None
    gates: tuple[GateEvidence, ...] = ()

    @property
    def is_live(self) -> bool:
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
        return replace(
            self, gates=(*(gate for gate in self.gates if gate.name != evidence.name), evidence)
        )

    def measured(self, contribution: Measurement) -> Self:
        return replace(self, contribution=contribution).judged(counterfactual_gate(contribution))

    def incubated(self, gain: Measurement) -> Self:
        return replace(self, shadow_gain=gain)


def germinate(blueprint_id: str, blend_id: str) -> SeedState:
    """A slot in which a seed has just been planted."""
    return replace(
        SeedState().advance(SeedStage.GERMINATED), blueprint_id=blueprint_id, blend_id=blend_id
    )


def tick(state: SeedState, lengths: StageLengths) -> SeedState:
    """The state for the epoch that is about to be trained:

    stages that are over end, alpha takes its next step.
    """
    while (ending := _natural_end(state, lengths)) is not None:
        target, evidence = ending
        state = (state if evidence is None else state.judged(evidence)).advance(target)
        if target in (SeedStage.FOSSILIZED, SeedStage.CULLED):
            # both are seen for one epoch, so that reports show how the seed's life ended
            break
    if state.stage is SeedStage.DORMANT:
        return state
    epochs, alpha = state.epochs_in_stage + 1, state.alpha
    if state.stage is SeedStage.BLENDING:
        assert state.blend_id is not None
        alpha = ramp_alpha(state.blend_id, epochs / lengths.ramp)
    return replace(state, epochs_in_stage=epochs, age=state.age + state.is_live, alpha=alpha)


def _natural_end(
    state: SeedState, lengths: StageLengths
) -> tuple[SeedStage, GateEvidence | None] | None:
    """Where a stage goes when its time is over, with the evidence that decided; None while it
    lasts.
    """
    match state.stage:
        case SeedStage.GERMINATED:
            return (SeedStage.TRAINING if lengths.ramp else SeedStage.FOSSILIZED), None
        case SeedStage.TRAINING if state.epochs_in_stage >= lengths.training:
            gate = shadow_gate(state.shadow_gain, lengths.training)
            return (SeedStage.BLENDING if gate.passed else SeedStage.CULLED), gate
        case SeedStage.BLENDING if (gate := ramp_gate(state.alpha)).passed:
            return SeedStage.PROBATIONARY, gate
        case SeedStage.PROBATIONARY if state.epochs_in_stage >= lengths.probation:
            # early evidence does not say what a seed is worth at the end, so that it was measured
            # is enough
            gate = counterfactual_gate(state.contribution)
            return (SeedStage.FOSSILIZED, gate) if gate.passed else None
        case SeedStage.FOSSILIZED:
            return SeedStage.DORMANT, None
        case SeedStage.CULLED:
            return SeedStage.EMBARGOED, None
        case SeedStage.EMBARGOED if state.epochs_in_stage >= lengths.embargo:
            return SeedStage.RESETTING, None
        case SeedStage.RESETTING if state.epochs_in_stage >= lengths.resetting:
            return SeedStage.DORMANT, None
        case _:
            return None
