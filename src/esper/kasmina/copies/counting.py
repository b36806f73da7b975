"""Which fields of a configuration say how long a list is, and what else of it follows.

Needs torch alone: exports carry this file along.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from esper.kasmina.copies.configuration import (
    Comparison,
    Difference,
    FieldValue,
    build_of,
    compare,
    rebuild,
    set_field,
)

# fields that say how long a list is
_COUNT = re.compile(
    r"((num|n|number_of)_)?((text|hidden|encoder|decoder|transformer)_)*(layers?|blocks?|depth)"
)
# fields that count something else
_NO_COUNT = re.compile(r"token|size|dim|head|rank|conv|expert|group")
# fields that hold a list with one entry per member, or the numbers of some members
_PER_MEMBER = re.compile(r"layer|block|type|index|indices|idx")


class UndescribedError(ValueError):
    """Raised where no configuration builds the longer network."""


@dataclass(frozen=True)
class Growth:
    """A list in a network that saves itself by its configuration, and what becomes of it."""

    keeper: Any
    """the network"""
    members: nn.Module
    """the list, which is as it is to be already"""
    path: str
    """its name in the host"""
    old_count: int
    sources: Sequence[int]
    """for each member the position that it, or the original of a copy, had before"""
    known: Comparison
    """in what the network differed before"""

    def lengthens(self, value: Any) -> bool:
        """Whether a value is a list with an entry for each member."""
        return type(value) in (list, tuple) and len(value) == self.old_count > 0


# -- what counts members ---------------------------------------------------------------------------


def count_options(thing: Any, path: str, count: int) -> list[list[FieldValue]]:
    """Sets of fields that may count a list of this length, the most likely first.

    Values are those that the fields have now.
    """
    named = [name for name in dir(thing) if _COUNT.fullmatch(name)]
    fields = [name for name in named if _is_count(_field_value(thing, name), count)]
    sides = [side for side in ("encoder", "decoder") if side in path]
    same_side = [name for name in fields if any(side in name for side in sides)]
    no_side = [name for name in fields if "coder" not in name]
    one_by_one = [[name] for name in fields]
    options: list[list[FieldValue]] = []
    for group in (same_side, no_side, fields, *one_by_one):
        option = [FieldValue(thing, name, count) for name in group]
        if option and option not in options:
            options.append(option)
    return options


def _field_value(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name, None)
    except Exception:  # a property of the user's may do anything
        return None


def _is_count(value: object, count: int) -> bool:
    return type(value) is int and value == count  # True counts nothing


def follow_counts(
    counts: Sequence[FieldValue],
    old_count: int,
    sources: Sequence[int],
    undo: ExitStack,
    *,
    with_lists: bool = True,
) -> None:
    """Set the fields that count members, and the lists that have to do with each member."""
    wanted = [FieldValue(thing, name, len(sources)) for thing, name, _ in counts]
    things = {id(change.thing): change.thing for change in counts}.values()
    for thing in things if with_lists else ():
        for name, value in getattr(thing, "__dict__", {}).items():
            if not _PER_MEMBER.search(name):
                continue
            options = _longer_lists(value, old_count, sources)
            if options:
                wanted.append(FieldValue(thing, name, options[0]))
    for change in wanted:
        _try_to_set(change, undo)


def _try_to_set(change: FieldValue, undo: ExitStack) -> None:
    """Set a field; a frozen one, or one that refuses the value, stays as it is."""
    with suppress(Exception):  # a configuration may check its values in any way
        set_field(*change, undo)


def _longer_lists(value: Any, old_count: int, sources: Sequence[int]) -> list[Any]:
    """What a list that has to do with members may be for the longer list, the likeliest first.

    It has an entry for each member, or the numbers of some of them.
    """
    options: list[Any] = []
    if type(value) not in (list, tuple) or not value:
        return options
    if len(value) == old_count:
        options.append(type(value)(value[source] for source in sources))
    are_numbers = all(type(entry) is int and 0 <= entry < old_count for entry in value)
    if are_numbers and list(value) == sorted(set(value)):
        positions = [position for position, source in enumerate(sources) if source in value]
        options.insert(0, type(value)(positions))
    return options


def _guesses(growth: Growth, usual: Sequence[FieldValue]) -> Iterator[FieldValue]:
    """Values that fields of configurations may need for the longer list, besides its length.

    A list may have to do with members under any name; a number may count the first or the last of
    them. `usual` has the values from before.
    """
    count, sources = growth.old_count, growth.sources
    for config, name, value in usual:
        options = _longer_lists(value, count, sources)
        if options:
            options.append(value)
        for option in options:
            yield FieldValue(config, name, option)
        if type(value) is int and 0 < value < count and not _NO_COUNT.search(name):
            yield FieldValue(config, name, sum(source < value for source in sources))
            yield FieldValue(config, name, sum(source >= count - value for source in sources))


def _fields_of(configs: Sequence[Any]) -> list[FieldValue]:
    """All fields of configurations with the values that they have now."""
    fields: list[FieldValue] = []
    for config in configs:
        for name, value in getattr(config, "__dict__", {}).items():
            if not name.startswith("_"):
                fields.append(FieldValue(config, name, value))
    return fields


def stage_options(config: Any, path: str, count: int, wanted: int) -> list[list[FieldValue]]:
    """Fields with the lengths of several lists, of which the one at `path` is one."""
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    options: list[list[FieldValue]] = []
    for name, value in getattr(config, "__dict__", {}).items():
        if type(value) not in (list, tuple):
            continue
        for number in numbers:
            if number < len(value) and _is_count(value[number], count):
                longer = list(value)
                longer[number] = wanted
                options.append([FieldValue(config, name, type(value)(longer))])
    return options


# -- the fields that build a longer network --------------------------------------------------------


@dataclass
class Attempt:
    """Fields of configurations, set until `undo` is closed, and what they build."""

    growth: Growth
    undo: ExitStack
    names: list[str]
    comparison: Comparison | None = None
    problem: str = ""

    def check(self) -> float:
        """How many differences are new; all count more than what cannot be compared."""
        growth = self.growth
        try:
            self.comparison = compare(growth.keeper, growth.members)
        except (ValueError, AttributeError) as problem:
            self.comparison, self.problem = None, str(problem)
            return math.inf
        new = [d for d in self.comparison.differences if d not in growth.known.differences]
        self.problem = _describe(new, self.names)
        return len(new)

    def set_lengths(self, fields: Sequence[FieldValue], *, with_lists: bool) -> None:
        """Set fields that count members, and the lists that go by members' names if they shall."""
        growth = self.growth
        counts = [change for change in fields if type(change.value) is int]
        follow_counts(counts, growth.old_count, growth.sources, self.undo, with_lists=with_lists)
        for change in fields:
            if type(change.value) is not int:
                _try_to_set(change, self.undo)

    def improve(self, usual: Sequence[FieldValue]) -> float:
        """Set further fields as long as that leaves fewer differences; how many are left.

        `usual` has the values of all fields from before.
        """
        guesses = list(_guesses(self.growth, usual))
        left = self.check()
        lists = [entry for entry in usual if self.growth.lengthens(entry.value)]
        if left == math.inf:
            # some configurations check their lists, and all have to be longer at once
            for entry in lists:
                options = _longer_lists(entry.value, self.growth.old_count, self.growth.sources)
                _try_to_set(entry._replace(value=options[-1]), self.undo)
            left = self.check()
        else:
            lists = []
        left = self._improve_one_by_one(guesses, left)
        for entry in lists if left == 0 else []:
            self._set_back(entry)
        return left

    def _set_back(self, entry: FieldValue) -> None:
        """Give a field its value from before, unless it has to be another one."""
        is_named = _PER_MEMBER.search(entry.field)
        with ExitStack() as undo:
            _try_to_set(entry, undo)
            if not is_named and self.check() == 0:
                self.undo.push(undo.pop_all())
                return
        self.check()

    def _improve_one_by_one(self, guesses: Sequence[FieldValue], left: float) -> float:
        while left:
            better = self._set_best(guesses, left)
            if better is None:
                break
            left = better
        return left

    def _set_best(self, guesses: Sequence[FieldValue], left: float) -> float | None:
        """Set the first field after which fewer differences are left; None without one."""
        comparison, problem = self.comparison, self.problem
        for guess in guesses:
            if _field_value(guess.thing, guess.field) == guess.value:
                continue
            with ExitStack() as undo:
                _try_to_set(guess, undo)
                fewer = self.check()
                if fewer < left:
                    self.undo.push(undo.pop_all())
                    self.names.append(guess.field)
                    return fewer
        self.comparison, self.problem = comparison, problem
        return None


def fit_configurations(
    growth: Growth, configs: Sequence[Any], accept: Callable[[], str | None]
) -> ExitStack:
    """Set the fields with which the configurations build the longer network.

    Nothing that was equal before may differ then. `accept` says why the network is still not
    right, and then other fields are tried. Raises ValueError with the first reason if none fit:
    an UndescribedError if the configurations are the reason.
    """
    problems: list[str] = []
    refusals: list[str] = []
    wanted = len(growth.sources)
    usual = _fields_of(configs)
    tried: set[str] = set()
    options: list[list[list[FieldValue]]] = []
    for config in configs:
        counts = count_options(config, growth.path, growth.old_count)
        stages = stage_options(config, growth.path, growth.old_count, wanted)
        options.append([*counts, *stages, []])
    for chosen, with_lists in itertools.product(itertools.product(*options), (True, False)):
        fields = list(itertools.chain(*chosen))
        with ExitStack() as undo:
            attempt = Attempt(growth, undo, [change.field for change in fields])
            attempt.set_lengths(fields, with_lists=with_lists)
            state = repr(_fields_of(configs))  # several names may mean one field
            if state in tried:
                continue
            tried.add(state)
            left = attempt.improve(usual) if fields else attempt.check()
            if left > 0 or attempt.comparison is None:
                problems.append(attempt.problem)
                continue
            _adopt(growth, attempt.comparison, undo)
            problem = accept()
            if problem is None:
                return undo.pop_all()
            refusals.append(problem)
    if refusals:
        raise ValueError(refusals[0])
    kind = type(growth.keeper.config).__name__
    if any(len(option) > 1 for option in options):
        raise UndescribedError(f"{kind} does not build the longer network ({problems[0]})")
    raise UndescribedError(
        f"no field of {kind} counts a list of {growth.old_count} layers; the field that counts its "
        f"layers would have to be set to {wanted}"
    )


def _adopt(growth: Growth, comparison: Comparison, undo: ExitStack) -> None:
    """Let modules have the numbers, fields and dropouts of the rebuilt network."""
    known = {(id(change.thing), change.field) for change in growth.known.outside}
    for change in comparison.numbers:
        set_field(*change, undo)
    for change in comparison.outside:
        if (id(change.thing), change.field) not in known:
            set_field(*change, undo)
    for member, name, part in comparison.parts:
        parent, _, key = name.rpartition(".")
        modules = member.get_submodule(parent)._modules
        before = modules[key]
        undo.callback(modules.__setitem__, key, before)
        modules[key] = part.train(before.training)


def _describe(differences: Sequence[Difference], fields: Sequence[str]) -> str:
    """The first differences that remain with these fields set, in words."""
    distinct = list(dict.fromkeys(differences))
    listed = [
        f"{difference.what} is {difference.ours}, rebuilt {difference.rebuilt}"
        for difference in distinct[:3]
    ]
    return f"with {', '.join(dict.fromkeys(fields)) or 'no field'} set: {'; '.join(listed)}"


def fields_that_tell_members_apart(keeper: Any, path: str, configs: Sequence[Any]) -> list[str]:
    """Fields of configurations that say by number or share which members of a list differ.

    Another value of such a field makes other members alike.
    """
    count = len(list(keeper.get_submodule(path).children()))
    usual = _kinds_of(keeper, path)
    names: list[str] = []
    for config in configs:
        for name, value in list(getattr(config, "__dict__", {}).items()):
            others: list[Any] = []
            if type(value) is int and 0 < value <= 2 * count and not name.startswith("_"):
                others = [value + 1, value - 1]
            elif type(value) is float and 0 < value < 1:
                others = [0.0]
            if any(_tells_apart(keeper, path, config, name, other, usual) for other in others):
                names.append(name)
    return list(dict.fromkeys(names))


def _tells_apart(
    keeper: Any, path: str, config: Any, name: str, other: Any, usual: list[int] | None
) -> bool:
    with ExitStack() as undo:
        _try_to_set(FieldValue(config, name, other), undo)
        kinds = _kinds_of(keeper, path)
    return kinds is not None and usual is not None and _pattern_differs(kinds, usual)


def _pattern_differs(kinds: list[int], usual: list[int]) -> bool:
    """Whether members that both networks have are alike to others; lengths may differ."""
    return any(one != other for one, other in zip(kinds, usual, strict=False))


def _kinds_of(keeper: Any, path: str) -> list[int] | None:
    """For each member that the configuration builds the first one that is like it."""
    try:
        members = list(rebuild(keeper).get_submodule(path).children())
    except (ValueError, AttributeError):
        return None
    builds = [build_of(member) for member in members]
    return [builds.index(build) for build in builds]
