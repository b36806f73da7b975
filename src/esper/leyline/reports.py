"""What a slot looks like from outside: plain values that policies, masks, screens and logs read.

None means "not measured". What may be done with a slot is said by `legality`.
"""

from dataclasses import dataclass, field

from esper.leyline.gates import GateEvidence
from esper.leyline.stages import LIVE_STAGES, SeedStage


@dataclass(frozen=True, slots=True)
class SeedMetrics:
    """Readings of one seed."""

    counterfactual_contribution: float | None = None
    """held-out loss without the slot minus with it, per example: positive means the seed helps"""
    counterfactual_standard_error: float | None = None
    """of the contribution, over the held-out examples"""
    seed_gradient_norm_ratio: float | None = None
    """gradient norm per parameter, seed over host"""
    seed_gradient_norm: float | None = None
    """mean over the last epoch's steps, before clipping"""
    greedy_score: float | None = None
    """how steeply the loss falls along the best linear map added at this slot"""
    seed_param_count: int = 0
    """parameters of the live seed; 0 without one"""
    host_param_count: int = 0
    """parameters of the host and all its fossils"""


@dataclass(frozen=True, slots=True)
class SeedStateReport:
    """One slot at the end of an epoch."""

    slot_id: str
    stage: SeedStage
    epochs_in_stage: int = 0
    seed_age_epochs: int = 0
    """epochs that the live seed has trained"""
    alpha: float = 0.0
    """the seed's share of the output, 0 to 1"""
    blueprint_id: str | None = None
    blend_algorithm_id: str | None = None
    fossil_count: int = 0
    """seeds of this slot that are host now"""
    kind: str = "image"
    """image, sequence or vector"""
    feature_shape: tuple[int, ...] = ()
    """shape of one example's features at this slot"""
    metrics: SeedMetrics = field(default_factory=SeedMetrics)
    gates: tuple[GateEvidence, ...] = ()
    """the newest evidence of each gate, in the order of judging"""

    @property
    def is_live(self) -> bool:
        """Whether the slot holds a seed of its own."""
        return self.stage in LIVE_STAGES

    @property
    def is_measured(self) -> bool:
        """Whether the seed's contribution has been measured."""
        return self.metrics.counterfactual_contribution is not None
