"""How seeds are raised in one network, and what a change of a slot looks like. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from esper.leyline.errors import SettingError, is_number
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import SeedState, StageLengths


@dataclass(frozen=True)
class GrowthSettings:
    """How seeds are raised in one network.

    >>> import esper
    >>> settings = esper.GrowthSettings(lengths=esper.StageLengths(ramp=3), epochs=20)
    >>> settings.lengths.ramp, settings.epochs, settings.prunes
    (3, 20, True)
    """

    lengths: StageLengths = field(default_factory=StageLengths)  # epochs per stage
    scale_at_birth: float = (
        0.0  # strength of a newborn seed's branch; 0 is the identity, 1 a cold start
    )
    blends: tuple[str, ...] = BLEND_IDS  # ways to blend that a policy may choose from
    epochs: int | None = (
        None  # length of the training, if known: policies then plant nothing too late to pay
    )
    kinds: Mapping[str, str] = field(
        default_factory=dict
    )  # module or pattern -> image, sequence or vector
    # seeds the weights of newborn seeds and the shadow pass; the global random state is never used
    seed: int = 0
    # whether fossils that do not pay are removed once, when the rate is a tenth of its peak
    prunes: bool = True
    least_gain: float = (
        0.0  # a fossil pays if the mean held-out loss is higher by more than this without it
    )

    def __post_init__(self) -> None:
        rules = {
            "lengths": ("StageLengths", isinstance(self.lengths, StageLengths)),
            "scale_at_birth": ("finite and at least 0", is_number(self.scale_at_birth, 0)),
            "epochs": (
                "whole, at least 1, or None",
                self.epochs is None or is_number(self.epochs, 1, is_whole=True),
            ),
            "seed": ("a whole number", is_number(self.seed, is_whole=True)),
            "prunes": ("True or False", self.prunes in (True, False)),
            "least_gain": ("finite and at least 0", is_number(self.least_gain, 0)),
        }
        for name, rule in [
            (name, rule) for name, (rule, is_right) in rules.items() if not is_right
        ]:
            raise SettingError(
                f"GrowthSettings.{name} must be {rule}, got {getattr(self, name)!r}."
            )


@dataclass(frozen=True)
class SlotChange:
    """One slot before and after an op or a tick."""

    slot_id: str
    before: SeedState
    after: SeedState
