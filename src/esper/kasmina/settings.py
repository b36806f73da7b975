"""How seeds are raised in one network, and what a change of a slot looks like. Plain data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import SeedState, StageLengths


@dataclass(frozen=True)
class GrowthSettings:
    """How seeds are raised in one network."""

    lengths: StageLengths = field(default_factory=StageLengths)  # epochs per stage
    scale_at_birth: float = 0.0
    """strength of a newborn seed's branch; 0 is the identity, 1 a cold start that learned fastest when measured"""
    blends: tuple[str, ...] = BLEND_IDS  # ways to blend that a policy may choose from
    epochs: int | None = None  # length of the training, if known: policies then plant nothing too late to pay
    kinds: Mapping[str, str] = field(default_factory=dict)
    """module name or pattern -> image, sequence or vector, where the rank of the features misleads"""
    seed: int = 0  # seeds the weights of newborn seeds and the shadow pass; the global random state is never used
    prunes: bool = True
    """whether fossils that do not pay are removed once, when the rate has fallen to a tenth of its peak"""
    least_gain: float = 0.0
    """what a fossil pays: it is removed unless the mean held-out loss is higher by more than this without it"""

    def __post_init__(self) -> None:
        if self.epochs is not None and (self.epochs < 1 or self.epochs % 1):
            raise SettingError(f"GrowthSettings.epochs must be whole, at least 1, or None; got {self.epochs}.")
        if not 0.0 <= self.least_gain < math.inf:
            raise SettingError(f"GrowthSettings.least_gain must be finite and at least 0, got {self.least_gain}.")


@dataclass(frozen=True)
class SlotChange:
    """One slot before and after an op or a tick."""

    slot_id: str
    before: SeedState
    after: SeedState
