"""Hosts of one task that differ: which values they draw, and from which ranges.

A family numbers its variations. What a number stands for, and which number a host seed plays,
depends on nothing but these two numbers, so it is the same on every machine and for ever. Which
examples a host has and which of its labels are wrong comes from its seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from esper.kasmina.randomness import mix_seed
from esper.leyline.errors import DataError, SettingError, UnknownNameError, is_number
from esper.runtime.splits import Splits, TensorSplit
from esper.telemetry.wording import describe_drawn, format_count

if TYPE_CHECKING:
    from esper.runtime.tasks.task import Task

MOST_VARIATIONS = 10**6

LEAST_HELD_OUT = 40
"""Held-out examples of a host that draws its examples, at least; else a quarter of these."""

# First parts of the seeds that variations and hosts are drawn with.
_NUMBERS = 401  # which variation a host seed plays
_VALUES = 402  # what a variation draws
_EXAMPLES = 403  # which examples a host has
_WRONG = 404  # which labels are wrong, and what they say


class _Drawn(NamedTuple):
    """What is known about a value that hosts may draw."""

    code: int  # of its own stream of draws; never used again for another value
    least: float
    most: float
    is_whole: bool = False


_DRAWN = {
    "examples": _Drawn(1, least=2, most=10**7, is_whole=True),
    "noise": _Drawn(2, least=0.0, most=0.99),
    "width": _Drawn(3, least=1, most=4096, is_whole=True),
    "depth": _Drawn(4, least=1, most=64, is_whole=True),
    "lr": _Drawn(5, least=1e-9, most=1e3),
    "budget": _Drawn(6, least=1.001, most=1e6),
}


@dataclass(frozen=True)
class Span:
    """What a value is drawn from: a range, or with `Span.of` a list.

    Args:
        least: the smallest value.
        most: the largest value.
        spacing: `even`, or `log` where a doubling counts the same everywhere.
        exact: share of the variations that get `least` exactly, such as 0.5 where half of the
            hosts have clean labels.
        listed: the only values there are.

    >>> import esper
    >>> esper.Span(60, 1000, "log")
    Span(60 to 1,000, log)
    >>> esper.Span(0, 0.45, exact=0.5), esper.Span.of(2, 3, 4)
    (Span(0 to 0.45, 0 for 50%), Span(2, 3, 4))
    """

    least: float
    most: float
    spacing: Literal["even", "log"] = "even"
    exact: float = 0.0
    listed: tuple[float, ...] | None = None

    @classmethod
    def of(cls, *values: float) -> Self:
        """Equally many variations get each of these values."""
        if not values:
            raise SettingError("a span of no values; list one at least.")
        return cls(min(values), max(values), listed=values)

    def __post_init__(self) -> None:
        for value in (self.least, self.most, *(self.listed or ())):
            if not is_number(value) or not math.isfinite(value):
                raise SettingError(f"a span has the bound {value!r}; bounds are finite numbers.")
        if self.spacing not in ("even", "log"):
            raise UnknownNameError("spacing", self.spacing, ("even", "log"))
        if self.least > self.most:
            raise SettingError(
                f"a span goes from {self.least:g} to {self.most:g}; name the smaller value first."
            )
        if self.spacing == "log" and self.least <= 0:
            raise SettingError(
                f"a span with spacing log begins at {self.least:g}; begin above 0, or use even."
            )
        if not is_number(self.exact, 0) or self.exact > 1:
            raise SettingError(f"a span has exact={self.exact!r}; it is a share from 0 to 1.")

    def draw(self, place: float, luck: float, *, is_whole: bool) -> float:
        """Return the value at this place, from 0 to 1; `luck` decides whether it is `least`."""
        if luck < self.exact:
            value = self.least
        elif self.listed is not None:
            value = self.listed[min(int(place * len(self.listed)), len(self.listed) - 1)]
        elif self.spacing == "log":
            value = self.least * (self.most / self.least) ** place
        elif is_whole:
            value = self.least + math.floor(place * (self.most - self.least + 1))
        else:
            value = self.least + place * (self.most - self.least)
        # few digits: powers differ between machines in the last one
        value = round(value) if is_whole else float(f"{value:.4g}")
        return min(max(value, self.least), self.most)

    def ends(self) -> tuple[float, ...]:
        """Return the smallest and the largest value, once where they are one."""
        return tuple(dict.fromkeys((self.least, self.most)))

    def whole_values(self) -> tuple[int, ...]:
        """Return every value of a span of counts."""
        if self.listed is not None:
            return tuple(int(value) for value in sorted(set(self.listed)))
        return tuple(range(int(self.least), int(self.most) + 1))

    def scaled(self, factor: float) -> Self:
        """Return the same span with every value multiplied."""
        listed = self.listed and tuple(value * factor for value in self.listed)
        return replace(self, least=self.least * factor, most=self.most * factor, listed=listed)

    def __str__(self) -> str:
        if self.listed is not None:
            return ", ".join(format_count(value) for value in self.listed)
        notes = ", log" if self.spacing == "log" else ""
        if self.exact:
            notes += f", {self.least:g} for {self.exact:.0%}"
        return f"{format_count(self.least)} to {format_count(self.most)}{notes}"

    def __repr__(self) -> str:
        return f"Span({self})"


@dataclass(frozen=True)
class Variation:
    """One variation of a family: its number and what it draws; None is as the task says."""

    number: int
    examples: int | None = None
    noise: float | None = None
    width: int | None = None
    depth: int | None = None
    lr: float | None = None
    budget: float | None = None

    @property
    def drawn(self) -> dict[str, float]:
        """What it draws, by name."""
        values = {name: getattr(self, name) for name in _DRAWN}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return describe_drawn(self.drawn)


@dataclass(frozen=True)
class Variety:
    """The ranges from which each host of a task draws; None is the task's own value for all.

    A task with a variety is a family. It has numbered variations. Number v always draws the same
    values, and those of one span do not depend on the other spans. A host seed always plays the
    same number; which examples it has and which labels are wrong depends on the seed itself.

    Args:
        variations: how many there are.
        examples: training examples; held-out ones are a quarter more, at least 40.
        noise: share of wrong labels in training and held-out examples; test labels are right.
        width: width of the host, for `build_host`.
        depth: depth of the host, for `build_host`.
        lr: peak learning rate.
        budget: most parameters, as a multiple of the host's.
        build_host: builds a host; it gets `width`, `depth` or both, as they vary.

    >>> from dataclasses import replace
    >>> import esper
    >>> from esper.runtime.population import Population
    >>> from esper.runtime.tasks.registry import get_task
    >>> few = esper.Variety(100, examples=esper.Span(80, 160), lr=esper.Span.of(0.05, 0.1))
    >>> family = replace(get_task("digits"), name="few_digits", varies=few)
    >>> population = Population(family, seeds=[0, 1])
    >>> [len(run.splits.train) for run in population.runs]
    [101, 113]
    """

    variations: int
    examples: Span | None = None
    noise: Span | None = None
    width: Span | None = None
    depth: Span | None = None
    lr: Span | None = None
    budget: Span | None = None
    build_host: Callable[..., nn.Module] | None = None

    def __post_init__(self) -> None:
        if not is_number(self.variations, 1, is_whole=True) or self.variations > MOST_VARIATIONS:
            raise SettingError(
                f"variations is {self.variations!r}; it is a whole number from 1 to "
                f"{MOST_VARIATIONS:,}."
            )
        if not self.spans:
            raise SettingError(f"nothing varies; give a span of {', '.join(_DRAWN)}.")
        for name, span in self.spans.items():
            _check_span(name, span)
        if bool(self.host_spans) != (self.build_host is not None):
            raise SettingError(
                "width and depth vary by build_host(width=..., depth=...): give both the spans "
                "and build_host, or neither."
            )

    @property
    def spans(self) -> dict[str, Span]:
        """The spans of what varies, by name."""
        spans = {name: getattr(self, name) for name in _DRAWN}
        return {name: span for name, span in spans.items() if span is not None}

    @property
    def host_spans(self) -> dict[str, Span]:
        """The spans of what `build_host` gets, by name."""
        return {name: span for name, span in self.spans.items() if name in ("width", "depth")}

    def variation(self, number: int) -> Variation:
        """Return the variation of this number."""
        values: dict[str, Any] = {}
        for name, span in self.spans.items():
            known = _DRAWN[name]
            place = mix_seed(_VALUES, number, known.code, 0) / 2**56
            luck = mix_seed(_VALUES, number, known.code, 1) / 2**56
            values[name] = span.draw(place, luck, is_whole=known.is_whole)
        return Variation(number, **values)

    def fixed(self, *names: str) -> "Variety | None":
        """Return the same where these values are the task's own; None where nothing varies.

        Names of what does not vary are passed over.
        """
        left = [name for name in self.spans if name not in names]
        if not left:
            return None
        changes: dict[str, Any] = dict.fromkeys(name for name in self.spans if name in names)
        if not {"width", "depth"} & set(left):
            changes["build_host"] = None
        return replace(self, **changes)

    def describe(self) -> dict[str, Any]:
        """Return the ranges as plain data."""
        ranges: dict[str, Any] = {}
        for name, span in self.spans.items():
            ranges[name] = {known.name: getattr(span, known.name) for known in fields(span)}
        return {"variations": self.variations, **ranges}

    def __str__(self) -> str:
        ranges = ", ".join(f"{name} {span}" for name, span in self.spans.items())
        return f"{self.variations:,} variations: {ranges}"


def _check_span(name: str, span: object) -> None:
    """Refuse a span of values that no host can have."""
    known = _DRAWN[name]
    if not isinstance(span, Span):
        raise SettingError(f"{name} is {span!r}; write Span(least, most) or Span.of(...).")
    if not known.least <= span.least <= span.most <= known.most:
        raise SettingError(
            f"{name} goes from {span.least:g} to {span.most:g}; it must lie between "
            f"{known.least:g} and {known.most:g}."
        )
    if known.is_whole and any(
        value != int(value) for value in (*span.ends(), *(span.listed or ()))
    ):
        raise SettingError(f"{name} is {span}; it is counted, so give whole numbers.")


def variation_of(task: "Task", seed: int) -> Variation | None:
    """Return the variation that a host seed plays; None where hosts of this task are alike.

    >>> from esper.runtime.tasks.registry import get_task
    >>> str(variation_of(get_task("digits_varied"), 1))
    '83 examples, noise 0.05506, width 2'
    >>> variation_of(get_task("digits"), 1) is None
    True
    """
    variety = task.varies
    if variety is None:
        return None
    return variety.variation(played_number(seed, variety.variations))


def played_number(seed: int, variations: int) -> int:
    """Return the number that a host seed plays of so many variations."""
    return mix_seed(seed, _NUMBERS) % variations


class HostTask(NamedTuple):
    """What one host is trained on."""

    task: "Task"
    splits: Splits
    variation: Variation | None


@dataclass(frozen=True)
class VariedHost:
    """Builds the host of a variation; equal for all variations of equal hosts."""

    build: Callable[..., nn.Module]
    sizes: tuple[tuple[str, int], ...]

    def __call__(self) -> nn.Module:
        """Build a newborn host."""
        return self.build(**dict(self.sizes))


def for_host(task: "Task", seed: int, pool: Splits) -> HostTask:
    """Return what the host of this seed is trained on: a task without variety, and its examples.

    `pool` is what the task loads. Where hosts of the task are alike, it returns both as they are.
    Else the held-out examples are those that the task wants already.
    """
    variation = variation_of(task, seed)
    if variation is None:
        return HostTask(task, pool, None)
    splits = draw_examples(task, variation, seed, pool)
    return HostTask(concrete(task, variation), splits, variation)


def concrete(task: "Task", variation: Variation) -> "Task":
    """Return the task of one variation; no host of it differs from another."""
    assert task.varies is not None
    changes: dict[str, Any] = {"varies": None, "held_out": None}
    for name in ("lr", "budget"):
        if name in variation.drawn:
            changes[name] = variation.drawn[name]
    sizes = {name: int(variation.drawn[name]) for name in task.varies.host_spans}
    if task.varies.build_host is not None:
        changes["build_host"] = VariedHost(task.varies.build_host, tuple(sizes.items()))
    return replace(task, **changes)


def shallowest(task: "Task") -> "Task":
    """Return a task of hosts with the fewest slots; the others of the family have these too."""
    if task.varies is None or task.varies.depth is None:
        return task
    return concrete(task, replace(task.varies.variation(0), depth=int(task.varies.depth.least)))


def at_rate(task: "Task", factor: float) -> "Task":
    """Return the task with its learning rate multiplied, of all hosts where they draw one."""
    changes: dict[str, Any] = {"lr": task.lr * factor}
    if task.varies is not None and task.varies.lr is not None:
        changes["varies"] = replace(task.varies, lr=task.varies.lr.scaled(factor))
    return replace(task, **changes)


def draw_examples(task: "Task", variation: Variation, seed: int, pool: Splits) -> Splits:
    """Return the examples of the host with this seed.

    What is drawn comes from the training and the validation split together; the test split is the
    same for all.
    """
    train = pool.train
    validation = pool.validation
    if variation.examples is not None or variation.noise:
        if not isinstance(train, TensorSplit) or not isinstance(validation, TensorSplit):
            raise DataError(
                f"task {task.name}: examples and noise vary where each example has a label; a text "
                "has none. Leave them out."
            )
        if variation.examples is not None:
            held_out = count_held_out(task, variation.examples)
            order = _permutation(seed, _EXAMPLES, len(train) + len(validation))
            whole = Splits(train, validation, pool.test)
            train = _gather(whole, order[: variation.examples])
            validation = _gather(whole, order[variation.examples : variation.examples + held_out])
        if variation.noise:
            classes = round(1 / task.chance)
            train = _spoil(train, variation.noise, classes, mix_seed(seed, _WRONG, 0))
            validation = _spoil(validation, variation.noise, classes, mix_seed(seed, _WRONG, 1))
    if variation.examples is None and task.held_out is not None:
        validation = validation.first(task.held_out)
    return replace(pool, train=train, validation=validation)


def count_held_out(task: "Task", examples: int) -> int:
    """Return how many held-out examples a host with so many training examples has."""
    return task.held_out or max(LEAST_HELD_OUT, round(examples / 4))


def _permutation(seed: int, purpose: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(mix_seed(seed, purpose))
    return torch.randperm(count, generator=generator)


def _gather(pool: Splits, rows: Tensor) -> TensorSplit:
    """These rows of the training split with the validation split behind it."""
    train = pool.train
    validation = pool.validation
    assert isinstance(train, TensorSplit)
    assert isinstance(validation, TensorSplit)
    rows = rows.to(train.inputs.device)
    is_later = rows >= len(train)
    first = rows.clamp(max=len(train) - 1)
    later = rows[is_later] - len(train)
    inputs = train.inputs[first]
    targets = train.targets[first]
    inputs[is_later] = validation.inputs[later]
    targets[is_later] = validation.targets[later]
    return replace(train, inputs=inputs, targets=targets)


def _spoil(split: TensorSplit, noise: float, classes: int, seed: int) -> TensorSplit:
    """The same examples, of which this share has the label of another class."""
    generator = torch.Generator().manual_seed(seed)
    count = round(noise * len(split))
    rows = torch.randperm(len(split), generator=generator)[:count]
    steps = torch.randint(1, classes, (count,), generator=generator)
    targets = split.targets.clone()
    device = targets.device
    rows = rows.to(device)
    targets[rows] = (targets[rows] + steps.to(device)) % classes
    return replace(split, targets=targets)
