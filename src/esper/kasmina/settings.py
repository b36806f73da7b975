"""How seeds are raised in one network, and what a change of a slot looks like. Plain data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat, SupportsIndex

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import SeedState, StageLengths


@dataclass(frozen=True)
class GrowthSettings:
    """How seeds are raised in one network."""

    lengths: StageLengths = field(default_factory=StageLengths)  # epochs per stage
    scale_at_birth: float = 0.0  # strength of a newborn seed's branch; 0 is the identity, 1 a cold start
    blends: tuple[str, ...] = BLEND_IDS  # ways to blend that a policy may choose from
    epochs: int | None = None  # length of the training, if known: policies then plant nothing too late to pay
    kinds: Mapping[str, str] = field(default_factory=dict)  # module or pattern -> image, sequence or vector
    seed: int = 0  # seeds the weights of newborn seeds and the shadow pass; the global random state is never used
    prunes: bool = True  # whether fossils that do not pay are removed once, when the rate is a tenth of its peak
    least_gain: float = 0.0  # a fossil pays if the mean held-out loss is higher by more than this without it

    def __post_init__(self) -> None:
        for name, kind in (("lengths", StageLengths), ("kinds", Mapping), ("seed", SupportsIndex), ("prunes", bool)):
            if not isinstance(value := getattr(self, name), kind):
                wanted = {"seed": "a whole number", "prunes": "True or False"}.get(name, f"a {kind.__name__}")
                raise SettingError(f"GrowthSettings.{name} must be {wanted}, got {value!r}.")
        if self.epochs is not None and (isinstance(self.epochs, str) or self.epochs < 1 or self.epochs % 1):
            raise SettingError(f"GrowthSettings.epochs must be whole, at least 1, or None; got {self.epochs!r}.")
        for name in ("scale_at_birth", "least_gain"):
            if not isinstance(value := getattr(self, name), SupportsFloat) or not 0.0 <= float(value) < math.inf:
                raise SettingError(f"GrowthSettings.{name} must be finite and at least 0, got {value!r}.")


@dataclass(frozen=True)
class SlotChange:
    """One slot before and after an op or a tick."""

    slot_id: str
    before: SeedState
    after: SeedState
