"""How seeds are raised in one network, and what a change of a slot looks like.

Plain data; the lengths of stages are in `lifecycle`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from esper.leyline.errors import SettingError, is_flag, is_number
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import SeedState, StageLengths
from esper.leyline.registry import in_order


@dataclass(frozen=True)
class GrowthSettings:
    """How seeds are raised in one network.

    Pass it to `esper.grow(..., settings=...)`; a value outside its range is refused at once.

    >>> import esper
    >>> settings = esper.GrowthSettings(lengths=esper.StageLengths(ramp=3), epochs=20)
    >>> settings.lengths.ramp, settings.epochs, settings.prunes
    (3, 20, True)
    """

    lengths: StageLengths = field(default_factory=StageLengths)
    """epochs per stage"""
    scale_at_birth: float = 0.0
    """strength of a newborn seed's branch; 0 is the identity, 1 a cold start"""
    blends: tuple[str, ...] = BLEND_IDS
    """ways to blend that a policy may choose from"""
    epochs: int | None = None
    """length of the training, if known: policies then plant nothing too late to pay, and fossils
    are judged after the last epoch at the latest"""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """module or pattern -> image, sequence or vector"""
    seed: int = 0
    """seeds newborn weights and the shadow pass; the global random state is never used"""
    prunes: bool = True
    """whether fossils that do not pay are removed once, when the rate is a tenth of its peak or the
    last of `epochs` is over"""
    least_gain: float = 0.0
    """a fossil pays if the mean held-out loss is higher by more than this without it"""

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, StageLengths):
            self._refuse("lengths", "StageLengths")
        if not isinstance(self.blends, Iterable):
            self._refuse("blends", "names of ways to blend")
        names = (self.blends,) if isinstance(self.blends, str) else in_order(self.blends)
        self._keep(blends=names)
        if not is_number(self.scale_at_birth, 0):
            self._refuse("scale_at_birth", "finite and at least 0")
        if self.epochs is not None and not is_number(self.epochs, 1, is_whole=True):
            self._refuse("epochs", "whole, at least 1, or None")
        if not _names_kinds(self.kinds):
            self._refuse("kinds", "a dict of module names or patterns and what features are")
        if not is_number(self.seed, is_whole=True):
            self._refuse("seed", "a whole number")
        if not is_flag(self.prunes):
            self._refuse("prunes", "True or False")
        if not is_number(self.least_gain, 0):
            self._refuse("least_gain", "finite and at least 0")
        self._keep(
            scale_at_birth=float(self.scale_at_birth),
            epochs=None if self.epochs is None else int(self.epochs),
            seed=int(self.seed),
            prunes=bool(self.prunes),
            least_gain=float(self.least_gain),
        )

    def _keep(self, **values: Any) -> None:
        """Take these values in place of those given: the same as numbers and tuples of Python."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _refuse(self, name: str, rule: str) -> NoReturn:
        value = getattr(self, name)
        raise SettingError(f"GrowthSettings.{name} must be {rule}, got {value!r}.")


def _names_kinds(kinds: object) -> bool:
    """Whether this is a dict of texts, as a save gives it back."""
    if not isinstance(kinds, Mapping):
        return False
    return all(isinstance(text, str) for pair in kinds.items() for text in pair)


@dataclass(frozen=True)
class SlotChange:
    """One slot before and after an op or a tick."""

    slot_id: str
    before: SeedState
    after: SeedState
