"""What hosts are trained on: data, host, loss, and every default of an episode.

A task is a value. Which tasks there are is in `registry`, where their data comes from in `data`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.errors import HostError, SettingError, UnknownNameError
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import StageLengths
from esper.leyline.rates import constant_then_cosine, is_low, warmup_constant_decay
from esper.runtime.batches import whole_steps
from esper.runtime.splits import Splits
from esper.runtime.tasks.families import Variety, concrete, count_held_out

T = TypeVar("T")
# From outputs and targets to the loss and the correctness of each example.
Score = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy_scores(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score classes [B, K] or next tokens [B, T, K].

    A text's loss and accuracy are the means over its tokens.
    """
    losses = nn.functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), reduction="none"
    )
    losses = losses.view(targets.shape)
    correct = (outputs.argmax(-1) == targets).float()
    if targets.dim() == 1:
        return losses, correct
    return losses.mean(1), correct.mean(1)


class Range(NamedTuple):
    """Bounds of a number."""

    above: float  # what every value is larger than
    most: float  # the largest value


@dataclass(frozen=True)
class About:
    """What is known about a field of `Task` beside its type and its default."""

    help: str
    affects: Literal["training", "growth", "nothing"] = "training"
    """What feels a change: every host that trains, only hosts that grow, or only its readers.

    `training` is the default: a new field that is not marked makes never-grown twins new, not
    stale.
    """
    least: int | None = None  # the smallest value
    range: Range | None = None
    choices: tuple[str, ...] | None = None


def knob(default: T, about: About) -> T:
    """Declare a field of `Task` that has a default."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Task:
    """One problem, with the defaults of a host's episode on it.

    The declaration of each field says what it is. A variant of a task is
    `dataclasses.replace(task, epochs=40)`.

    >>> import torch, esper
    >>> from esper.runtime.splits import SealedSplit, Splits, TensorSplit, carve
    >>> def load(root):
    ...     points = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
    ...     whole = TensorSplit(points, (points.sum(1) > 1).long())
    ...     seen, test = carve(whole, share=0.25)
    ...     train, validation = carve(seen)
    ...     return Splits(train, validation, SealedSplit(test))
    >>> task = esper.Task(
    ...     name="sums",
    ...     summary="whether two numbers add up to more than 1",
    ...     source="generated",
    ...     load=load,
    ...     build_host=lambda: torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 2)),
    ...     chance=0.5,
    ...     epochs=4,
    ... )
    >>> [round(task.rate(epoch), 3) for epoch in range(task.epochs)]
    [0.1, 0.1, 0.085, 0.015]
    """

    name: str = field(metadata={"about": About("what hosts are trained on, see `esper list`")})
    summary: str = field(metadata={"about": About("one line for people", affects="nothing")})
    source: str = field(metadata={"about": About("where the data comes from", affects="nothing")})
    load: Callable[[Path | None], Splits] = field(
        metadata={"about": About("reads the splits from the folder that holds the data sets")}
    )
    build_host: Callable[[], nn.Module] = field(metadata={"about": About("builds a newborn host")})
    # the governor knows a collapse by it
    chance: float = field(metadata={"about": About("accuracy of random guessing")})
    score: Score = field(
        default=cross_entropy_scores,
        metadata={"about": About("loss and correctness of each example")},
    )
    # all steps of an epoch have as many
    batch: int = knob(128, About("most examples per training step", least=1))
    optimizer: str = knob(
        "sgd", About("sgd (Nesterov momentum 0.9) or adamw", choices=("sgd", "adamw"))
    )
    beta2: float = knob(0.999, About("decay of AdamW's squared gradients"))
    lr: float = knob(0.1, About("peak learning rate"))
    weight_decay: float = knob(5e-4, About("weight decay of the optimiser"))
    clip_norm: float = knob(
        5.0, About("largest gradient norm of the host, and of each seed by itself")
    )
    clock: str = knob(
        "epochs",
        About(
            "unit of an episode's length: epochs (rate constant, then a cosine) or compute "
            "(warm-up, constant, decay)",
            choices=("epochs", "compute"),
        ),
    )
    constant_share: float = knob(0.5, About("clock epochs: part of the episode at the peak rate"))
    compute: float = knob(
        1.0, About("FLOPs of an episode; 1 is the task's reference run", range=Range(0, 1e4))
    )
    # None is the host itself, for all epochs
    reference: tuple[Callable[[], nn.Module], int] | None = knob(
        None, About("the run that is 1 of compute: a network, and how many examples it learns from")
    )
    warmup: float = knob(
        0.03,
        About("first part of the compute, in which the learning rate rises", range=Range(0, 1)),
    )
    decay: float = knob(
        0.2,
        About(
            "last part of the compute, in which the learning rate falls to zero", range=Range(0, 1)
        ),
    )
    # None is one pass over the training split
    epoch_examples: int | None = knob(
        None,
        About("least examples per epoch and decision, rounded up to steps of one size", least=1),
    )
    # None is all that were carved off
    held_out: int | None = knob(
        None, About("validation examples to measure on, always the same ones", least=2)
    )
    epochs: int = knob(20, About("epochs in an episode, or decisions", least=1))
    augment: bool = knob(
        False, About("shift by up to 4 pixels and mirror, drawn for every example")
    )
    # modules by name or pattern, or ids of slots that the host declares; None is all of those
    slots: tuple[str, ...] | None = knob(
        None, About("modules or slots that may grow: layer1 r0c1", affects="growth")
    )
    # None is every built-in blueprint that fits
    blueprints: tuple[str, ...] | None = knob(None, About("what may be planted", affects="growth"))
    budget: float = knob(
        3.0, About("most parameters, as a multiple of the host's", affects="growth")
    )
    max_seeds: int | None = knob(None, About("most seeds, live and kept", affects="growth"))
    blends: tuple[str, ...] = knob(
        BLEND_IDS,
        About(
            "ways to blend that a policy may choose from: linear, sigmoid, gated", affects="growth"
        ),
    )
    lengths: StageLengths = field(
        default_factory=StageLengths,
        metadata={"about": About("epochs that each stage of a seed lasts", affects="growth")},
    )
    scale_at_birth: float = knob(
        1.0,
        About(
            "strength of a newborn seed's branch; 0 is the identity, 1 a cold start",
            affects="growth",
        ),
    )
    prunes: bool = knob(
        True,
        About(
            "whether kept seeds that do not pay are removed when the rate has fallen to a tenth of "
            "its peak",
            affects="growth",
        ),
    )
    # None: all hosts are alike
    varies: Variety | None = field(
        default=None,
        metadata={
            "about": About("ranges from which each host draws its examples, noise, width and more")
        },
    )

    def __post_init__(self) -> None:
        for name, known in FIELDS.items():
            self._check(name, known)
        if self.varies is not None:
            self._check_variety(self.varies)

    def _check_variety(self, variety: Variety) -> None:
        """Refuse ranges that do not fit the rest of the task."""
        if variety.examples is not None and variety.examples.least < self.batch:
            raise SettingError(
                f"task {self.name}: hosts have {variety.examples.least:,g} examples or more, fewer "
                f"than a batch of {self.batch}. Lower the batch, or raise the least of examples."
            )
        if variety.noise is not None and variety.noise.most >= 1 - self.chance:
            raise SettingError(
                f"task {self.name}: noise goes up to {variety.noise.most:g}, but from "
                f"{1 - self.chance:g} on labels say nothing. Lower the most of noise."
            )

    def _check(self, name: str, known: About) -> None:
        """Refuse a value outside the bounds of its field."""
        value = getattr(self, name)
        if value is None:
            return
        if known.least is not None and value < known.least:
            raise SettingError(
                f"task {self.name}: {name} must be at least {known.least}, got {value}."
            )
        if known.choices is not None and value not in known.choices:
            raise UnknownNameError(name, value, known.choices)
        if known.range is not None and not known.range.above < value <= known.range.most:
            raise SettingError(
                f"task {self.name}: {name} is {value}, but must be above {known.range.above:g} and "
                f"at most {known.range.most:g}."
            )

    def rate_at(self, share: float) -> float:
        """Return the learning rate when this share of the episode is over.

        It does not depend on actions.
        """
        if self.clock == "compute":
            return warmup_constant_decay(self.lr, share, self.warmup, self.decay)
        return constant_then_cosine(self.lr, share, self.constant_share)

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch or decision: what the plan has in its middle."""
        return self.rate_at((epoch + 0.5) / self.epochs)

    def is_rate_low(self, epoch: int) -> bool:
        """Say whether the plan has fallen to a tenth of its peak when this epoch begins.

        Where the plan has no such epoch, it is low after the last one.
        """
        is_rising = epoch + 0.5 < self.warmup * self.epochs
        return epoch >= self.epochs or (is_low(self.rate(epoch), self.lr) and not is_rising)


FIELDS: dict[str, About] = {known.name: known.metadata["about"] for known in fields(Task)}
"""What is known about each field of `Task`, by name."""


def training_fields() -> list[str]:
    """Return the names of the fields that a host feels even if nothing grows."""
    return [name for name, known in FIELDS.items() if known.affects == "training"]


def check_fit(task: Task, splits: Splits) -> None:
    """Raise an error for what would fail in the middle of an epoch.

    That is a batch larger than the training split, too few validation examples, a host whose
    inputs or outputs do not fit the data, or one that cannot learn from the examples of a step. Of
    a family the smallest and the largest hosts are checked.
    """
    if task.varies is not None:
        _check_family(task, task.varies, splits)
        return
    if task.batch > len(splits.train):
        raise SettingError(
            f"task {task.name}: a batch of {task.batch} is larger than its training split of "
            f"{len(splits.train)} examples; lower the batch."
        )
    held_out = len(splits.validation)
    if task.held_out is not None and task.held_out > held_out:
        raise SettingError(
            f"task {task.name}: held_out is {task.held_out}, but the validation split has "
            f"{held_out}; lower held_out."
        )
    example = splits.train.example().to("meta")
    try:
        with torch.device("meta"):
            host = task.build_host().eval()
            outputs = host(example).shape[-1]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as problem:
        shape = tuple(example.shape[1:])
        raise HostError(
            f"task {task.name}: the host does not run on examples of shape {shape}: {problem}"
        ) from problem
    classes = round(1 / task.chance)
    if task.score is cross_entropy_scores and outputs < classes:
        raise HostError(
            f"task {task.name}: the host has {outputs} outputs for {classes} classes; give its "
            f"head {classes}."
        )
    steps = whole_steps(task.epoch_examples or len(splits.train), task.batch)
    if steps.size == 1:
        _refuse_lone_examples(task, host, example[:1])


def _check_family(task: Task, variety: Variety, splits: Splits) -> None:
    """Check the hosts at the ends of what varies; which examples they have does not matter."""
    there = len(splits.train) + len(splits.validation)
    if variety.examples is not None:
        examples = int(variety.examples.most)
        needed = examples + count_held_out(task, examples)
        if needed > there:
            raise SettingError(
                f"task {task.name}: a host with {examples:,} examples needs {needed:,} with its "
                f"held-out ones, but there are {there:,}. Lower the most of examples."
            )
    ends = [span.ends() for span in variety.host_spans.values()]
    for sizes in product(*ends):
        changes = dict(zip(variety.host_spans, map(int, sizes), strict=True))
        check_fit(concrete(task, replace(variety.variation(0), **changes)), splits)


def _refuse_lone_examples(task: Task, host: nn.Module, example: Tensor) -> None:
    """Raise an error where a host cannot learn from one example, as with batch norm."""
    try:
        with torch.device("meta"):
            host.train()(example)
    except ValueError as problem:
        raise HostError(
            f"task {task.name}: each step learns from one example, and the host cannot: {problem}. "
            f"Raise batch or epoch_examples to 2 or more, or take batch norm out of the host."
        ) from problem
    except RuntimeError:  # what a host does in training mode only, the meta device may not run
        return
