"""The numbers that the growth network reads, by name, and where they lie in an observation.

An observation is a row of the host, a row for each slot, a row for each blueprint, and one for each
pair of both. How the numbers are read off a host is in `readings`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.errors import SettingError


@dataclass(frozen=True)
class RowLayout:
    """What one kind of row has, in this order: numbers, a flag for each optional one, switches.

    Numbers are normalised by running statistics; flags and switches are 0 or 1 and stay as they
    are. An optional number that was not measured is 0, and so is its flag.
    """

    numbers: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """those of the numbers that may be absent"""
    switches: tuple[str, ...] = ()
    """the first one is whether the row is there at all"""

    @property
    def width(self) -> int:
        """How many numbers, flags and switches there are."""
        return len(self.numbers) + len(self.optional) + len(self.switches)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all of them, in order."""
        return (*self.numbers, *(f"has_{name}" for name in self.optional), *self.switches)

    @cached_property
    def presence_columns(self) -> list[int]:
        """For each number the column that says whether it is there: its flag or the whole row's."""
        flags = len(self.numbers)
        whole = flags + len(self.optional)
        columns = []
        for name in self.numbers:
            is_optional = name in self.optional
            columns.append(flags + self.optional.index(name) if is_optional else whole)
        return columns

    def presence(self, rows: Tensor) -> Tensor:
        """Which numbers of rows [..., width] are there, as 0 or 1; without switches all are."""
        if not self.switches:
            return torch.ones_like(rows[..., : len(self.numbers)])
        return rows[..., self.presence_columns]


_MAY_LACK = (
    "share_left",
    "rate",
    "learnt",
    "standing",
    "standing_1_ago",
    "standing_2_ago",
    "standing_3_ago",
    "standing_4_ago",
    "slope_in_errors",
    "slope",
    "since_best",
    "train_learnt",
    "train_slope",
    "gap",
    "gap_share",
    "score",
    "score_slope_in_errors",
    "params_share",
    "room",
    "seeds_share",
)
"""Numbers of the host that a loop may not have."""

BASE_ROW = RowLayout(
    numbers=("epochs", "grown", "live_share", "fossils", "slots", *_MAY_LACK),
    optional=_MAY_LACK,
    switches=("present", "guessing_known"),
)
"""Of the host as a whole."""

SLOT_ROW = RowLayout(
    numbers=(
        "place",
        "fossils",
        "epochs_in_stage",
        "seed_age",
        "alpha",
        "relative_size",
        "depth",
        "contribution_in_errors",
        "contribution",
        "gradient_ratio",
        "score_ratio",
        "cheapest",
        "mean_price",
        "cheapest_of_room",
        "mean_of_room",
    ),
    optional=(
        "contribution_in_errors",
        "contribution",
        "gradient_ratio",
        "score_ratio",
        "cheapest",
        "mean_price",
        "cheapest_of_room",
        "mean_of_room",
    ),
    switches=(
        "present",
        "first",
        "last",
        "image",
        "sequence",
        "vector",
        "dormant",
        "training",
        "blending",
        "on_probation",
        "fossilized",
        "closed",
        "spatial",
        "attention_like",
        "normalising",
    ),
)
"""Of one slot."""

BLUEPRINT_ROW = RowLayout(
    numbers=("spatial", "attention_like", "normalising", "depth", "size", "work"),
    optional=("size", "work"),
    switches=("present", "none", "copies", "begins_as_identity"),
)
"""Of one blueprint, wherever it fits."""

PAIR_ROW = RowLayout(
    numbers=("size", "work", "size_of_room"),
    optional=("work", "size_of_room"),
    switches=("fits",),
)
"""Of one blueprint in one slot."""


class Seen(NamedTuple):
    """Observations taken apart; the leading axes are those of the observations."""

    base: Tensor  # [..., B]
    slots: Tensor  # [..., S, F]
    blueprints: Tensor  # [..., K, G]
    pairs: Tensor  # [..., S, K, P]


class Columns(NamedTuple):
    """What each number of an observation is."""

    statistics: list[int]
    """which of the running statistics are its own; -1 is none, of flags and switches"""
    presence: list[int]
    """the number that says whether it is there; a flag or switch says nothing of itself"""


@dataclass(frozen=True)
class ObservationLayout:
    """The observation of a host with so many slots and blueprints; index 0 of these is none.

    It may be larger than the host: absent slots and blueprints are all zero.

    >>> layout = ObservationLayout(num_slots=2, num_blueprints=4)
    >>> layout.width == layout.base.width + 2 * layout.slot.width + 4 * layout.blueprint.width + (
    ...     2 * 4 * layout.pair.width
    ... )
    True
    """

    num_slots: int
    num_blueprints: int

    base = BASE_ROW
    slot = SLOT_ROW
    blueprint = BLUEPRINT_ROW
    pair = PAIR_ROW

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.num_blueprints < 2:
            raise SettingError(
                f"a layout has {self.num_slots} slots and {self.num_blueprints} blueprints; it "
                f"needs 1 slot, and 2 blueprints of which the first is none."
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """How many numbers the host, all slots, all blueprints and all pairs have."""
        return (
            self.base.width,
            self.num_slots * self.slot.width,
            self.num_blueprints * self.blueprint.width,
            self.num_slots * self.num_blueprints * self.pair.width,
        )

    @property
    def width(self) -> int:
        """How many numbers an observation has."""
        return sum(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all numbers in order, as `host.epochs` or `slot0.place`."""
        names = [f"host.{name}" for name in self.base.names]
        for slot in range(self.num_slots):
            names += [f"slot{slot}.{name}" for name in self.slot.names]
        for blueprint in range(self.num_blueprints):
            names += [f"blueprint{blueprint}.{name}" for name in self.blueprint.names]
        for slot in range(self.num_slots):
            for blueprint in range(self.num_blueprints):
                place = f"slot{slot}.blueprint{blueprint}"
                names += [f"{place}.{name}" for name in self.pair.names]
        return tuple(names)

    @cached_property
    def columns(self) -> Columns:
        """What each number of an observation is."""
        kinds = (self.base, self.slot, self.blueprint, self.pair)
        statistics: list[int] = []
        presence: list[int] = []
        known = 0
        for kind, size in zip(kinds, self.sizes, strict=True):
            numbers = [known + index for index in range(len(kind.numbers))]
            rest = kind.width - len(numbers)
            for _ in range(size // kind.width):
                first = len(statistics)
                presence += [first + column for column in kind.presence_columns]
                statistics += numbers
                presence += range(first + len(numbers), first + kind.width)
                statistics += [-1] * rest
            known += len(numbers)
        return Columns(statistics=statistics, presence=presence)

    def split(self, states: Tensor) -> Seen:
        """Observations [..., width] in their parts."""
        base, slots, blueprints, pairs = states.split(self.sizes, -1)
        lead = states.shape[:-1]
        return Seen(
            base=base,
            slots=slots.reshape(*lead, self.num_slots, self.slot.width),
            blueprints=blueprints.reshape(*lead, self.num_blueprints, self.blueprint.width),
            pairs=pairs.reshape(*lead, self.num_slots, self.num_blueprints, self.pair.width),
        )


_CODES = 4  # pairs of waves that tell numbered rows apart


@dataclass(frozen=True)
class PlainLayout:
    """Observations without structure: slots and blueprints differ by their numbers alone.

    A network for numbers of anybody's own has it.
    """

    state_dim: int
    num_slots: int
    num_blueprints: int

    slot = RowLayout((), (), ("present", *(f"code_{index}" for index in range(2 * _CODES))))
    blueprint = slot
    pair = RowLayout((), (), ("fits",))

    @property
    def columns(self) -> Columns:
        """All are numbers, and all are there."""
        return Columns(statistics=[*range(self.state_dim)], presence=[])

    @property
    def base(self) -> RowLayout:
        """The whole observation."""
        return RowLayout(tuple(str(index) for index in range(self.state_dim)))

    @property
    def width(self) -> int:
        """How many numbers an observation has."""
        return self.state_dim

    def split(self, states: Tensor) -> Seen:
        """Observations [..., width], with rows that number slots and blueprints."""
        lead = states.shape[:-1]
        slots = _codes(self.num_slots, states)
        blueprints = _codes(self.num_blueprints, states)
        pairs = states.new_ones(self.num_slots, self.num_blueprints, 1)
        return Seen(
            base=states,
            slots=slots.expand(*lead, *slots.shape),
            blueprints=blueprints.expand(*lead, *blueprints.shape),
            pairs=pairs.expand(*lead, *pairs.shape),
        )


AnyLayout = ObservationLayout | PlainLayout


def _codes(count: int, like: Tensor) -> Tensor:
    """Rows [count, 1 + waves] that tell their numbers apart; the first column is 1."""
    numbers = torch.arange(count, device=like.device, dtype=like.dtype)[:, None]
    paces = 2.0 ** -torch.arange(_CODES, device=like.device, dtype=like.dtype)
    waves = numbers * paces * 2
    return torch.cat([torch.ones_like(numbers), waves.sin(), waves.cos()], 1)
