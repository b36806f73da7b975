"""What a slot looks like from outside.

Policies, masks, screens and logs read these; None means "not measured".
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
    seed_gradient_norm_ratio: float | None = None  # gradient norm per parameter, seed over host
    seed_gradient_norm: float | None = None  # mean over the last epoch's steps, before clipping
    greedy_score: float | None = (
        None  # how steeply the loss falls along the best linear map added at this slot
    )
    seed_param_count: int = 0
    host_param_count: int = 0  # host and all its fossils


@dataclass(frozen=True, slots=True)
class SeedStateReport:
    """One slot at the end of an epoch."""

    slot_id: str
    stage: SeedStage
    epochs_in_stage: int = 0
    seed_age_epochs: int = 0
    alpha: float = 0.0
    blueprint_id: str | None = None
    blend_algorithm_id: str | None = None
    fossil_count: int = 0
    kind: str = "image"
    feature_shape: tuple[int, ...] = ()  # shape of one example's features at this slot
    metrics: SeedMetrics = field(default_factory=SeedMetrics)
    gates: tuple[GateEvidence, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.stage in LIVE_STAGES

    @property
    def is_measured(self) -> bool:
        return self.metrics.counterfactual_contribution is not None
