"""Suites: families that one policy is taught on, and the variations it is judged on.

A suite reserves numbers of variations. Training never draws a host that plays one of them; a
comparison with the suite draws no other. Plain data; nothing here runs.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, Self

from pydantic import Field

from esper.leyline.configuration import Configuration, read_json
from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.config import TaskConfig
from esper.runtime.tasks.families import played_number
from esper.runtime.tasks.task import Task

_MOST_TRIES = 10**7
"""Host seeds that are looked at for one that may be drawn."""


class FamilyConfig(Configuration):
    """One family of a suite."""

    task: TaskConfig = Field(description="the task whose hosts differ, with settings of its own")
    weight: float = Field(default=1.0, gt=0, le=1e6, description="its share of the hosts")


class SuiteConfig(Configuration):
    """Families with their weights, and which variations of each are kept for judging."""

    families: tuple[FamilyConfig, ...] = Field(min_length=1, max_length=100)
    reserved: tuple[int, int] | None = None
    """first and last number of the variations that training never draws"""

    @classmethod
    def read(cls, path: Any) -> Self:
        """A checked suite from a JSON file.

        >>> from pathlib import Path
        >>> text = '{"families": [{"task": {"name": "digits_varied"}}], "reserved": [0, 149]}'
        >>> _ = Path("suite.json").write_text(text)
        >>> SuiteConfig.read("suite.json").reserved
        (0, 149)
        """
        return cls.of(read_json(path), str(path))

    def check(self) -> None:
        """Refuse tasks whose hosts are alike, and reserved numbers that leave nothing."""
        names = [family.task.name for family in self.families]
        if len(set(names)) < len(names):
            raise SettingError(
                f"the suite names a family twice: {', '.join(names)}. Name each once, and give it "
                "a weight."
            )
        for family in self.families:
            self._check_family(family.task.build())
        clocks = {family.task.build().clock for family in self.families}
        if len(clocks) > 1:
            raise SettingError(
                "families of one suite are rewarded alike, but some count epochs and others "
                "compute. Give all of them one clock."
            )

    def _check_family(self, task: Task) -> None:
        """Refuse a task that is no family, and one of which too much or nothing is reserved."""
        if task.varies is None:
            raise SettingError(
                f"a suite is of families, but hosts of {task.name} are alike. Name a task that "
                "varies (esper list), such as digits_varied."
            )
        if self.reserved is None:
            return
        first, last = self.reserved
        total = task.varies.variations
        if not 0 <= first <= last < total:
            raise SettingError(
                f"reserved is [{first}, {last}], but the variations of {task.name} are numbered "
                f"from 0 to {total - 1}; write [first, last]."
            )
        if last - first + 1 == total:
            raise SettingError(
                f"reserved is [{first}, {last}]: all variations of {task.name}, so none is left to "
                "train on. Reserve fewer."
            )

    def family(self, name: str | None) -> FamilyConfig:
        """The family of this task; without a name the only one."""
        by_name = {family.task.name: family for family in self.families}
        if name is None and len(by_name) > 1:
            raise SettingError(
                f"the suite has the families {', '.join(by_name)}; name one: --task "
                f"{next(iter(by_name))}."
            )
        if name is not None and name not in by_name:
            raise UnknownNameError("family of the suite", name, by_name)
        return by_name[name] if name is not None else self.families[0]

    def settled(self) -> Self:
        """The same with the length of every task written out."""
        families = [
            family.model_copy(update={"task": family.task.settled}) for family in self.families
        ]
        return self.model_copy(update={"families": tuple(families)})

    def shares(self, total: int, what: str) -> list[int]:
        """How many of so many hosts each family gets: by weight, one at least."""
        return share_out([family.weight for family in self.families], total, what)

    def training_seeds(self, task: Task, candidates: Iterator[int], count: int) -> tuple[int, ...]:
        """The first of these host seeds that training may draw."""
        assert task.varies is not None
        return tuple(
            _choose(task.varies.variations, self.reserved, candidates, count, is_reserved=False)
        )

    def judging_seeds(self, task: Task, first: int, count: int) -> tuple[int, ...]:
        """Host seeds from `first` on that play reserved variations."""
        assert task.varies is not None
        if self.reserved is None:
            raise SettingError(
                "the suite reserves nothing, so there is nothing to judge on that training never "
                'draws. Add "reserved": [first, last] to it.'
            )
        return _judging_seeds(task.varies.variations, self.reserved, first, count)


def share_out(weights: Sequence[float], total: int, what: str) -> list[int]:
    """Split a count by weights, one at least for each; larger remainders come first.

    >>> share_out([2.0, 1.0, 1.0], 8, "hosts"), share_out([98.0, 1.0, 1.0], 4, "hosts")
    ([4, 2, 2], [2, 1, 1])
    """
    if total < len(weights):
        raise SettingError(
            f"{what} is {total}, fewer than the suite's {len(weights)} families. Raise it to "
            f"{len(weights)} or more, or name fewer families."
        )
    shares = [1] * len(weights)
    for _ in range(total - len(weights)):
        lacking = [
            total * weight / sum(weights) - share
            for weight, share in zip(weights, shares, strict=True)
        ]
        shares[lacking.index(max(lacking))] += 1
    return shares


@cache
def _judging_seeds(
    variations: int, reserved: tuple[int, int], first: int, wanted: int
) -> tuple[int, ...]:
    return tuple(_choose(variations, reserved, itertools.count(first), wanted, is_reserved=True))


def _choose(
    variations: int,
    reserved: tuple[int, int] | None,
    candidates: Iterator[int],
    wanted: int,
    *,
    is_reserved: bool,
) -> Iterator[int]:
    """The first seeds whose variation is reserved, or is not."""
    first, last = reserved or (0, -1)
    left = wanted
    for seed in islice(candidates, _MOST_TRIES):
        if left == 0:
            return
        if (first <= played_number(seed, variations) <= last) == is_reserved:
            left -= 1
            yield seed
    if left == 0:
        return
    raise SettingError(
        f"{wanted - left} of {wanted} host seeds were found among {_MOST_TRIES:,}; "
        "reserve a larger part of the variations, or leave more."
    )
