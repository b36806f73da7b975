"""What hosts are trained on:

data, host, loss, and every default of an episode. A task is a value in a dict.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import (
    ChainHost,
    build_cnn_host,
    build_mlp_host,
    build_resnet_host,
    build_transformer_host,
)
from esper.leyline.errors import DataError, HostError, SettingError, UnknownNameError
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import StageLengths
from esper.leyline.rates import constant_then_cosine, is_low, warmup_constant_decay
from esper.leyline.registry import enter
from esper.runtime.splits import SealedSplit, Splits, TensorSplit, carve
from esper.runtime.tasks import data

Score = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor]
]  # (outputs, targets) -> loss and correctness of each example
Examples = torch.utils.data.Dataset[tuple[Tensor, int]]


def cross_entropy_scores(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Classes [B, K] or next tokens [B, T, K]; a text's loss and accuracy are the means over its
    tokens.
    """
    losses = nn.functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), reduction="none"
    )
    correct = (outputs.argmax(-1) == targets).float()
    losses = losses.view(targets.shape)
    return (losses, correct) if targets.dim() == 1 else (losses.mean(1), correct.mean(1))


@dataclass(frozen=True)
class Task:
    """One problem with the defaults of a host's episode on it."""

    name: str
    summary: str
    source: str  # where the data comes from
    load: Callable[[Path | None], Splits]
    build_host: Callable[[], nn.Module]
    chance: float  # accuracy of random guessing; the governor knows a collapse by it
    score: Score = cross_entropy_scores
    batch: int = 128  # most examples per step; all steps of an epoch have as many
    optimizer: str = "sgd"  # sgd (nesterov momentum 0.9) or adamw
    beta2: float = 0.999  # decay of AdamW's squared gradients
    lr: float = 0.1  # peak rate
    weight_decay: float = 5e-4
    clip_norm: float = 5.0  # largest gradient norm of the host, and of each seed by itself
    clock: str = "epochs"
    """what an episode is a length of:

    epochs (rate constant, then a cosine), or compute (warm-up, constant, decay)
    """
    constant_share: float = 0.5  # clock epochs: part of the episode at the peak rate
    compute: float = 1.0  # clock compute: FLOPs of an episode, in units of the reference run
    reference: tuple[Callable[[], nn.Module], int] | None = None
    """the run that is 1.0 of compute, a network and how many examples it learns from; None is the
    host, all epochs
    """
    warmup: float = 0.03  # clock compute: part of it in which the rate rises
    decay: float = 0.2  # clock compute: last part of it, in which the rate falls to zero
    epoch_examples: int | None = None
    """least examples per epoch and decision, rounded up to whole steps; None is one pass over the
    training split
    """
    held_out: int | None = None
    """validation examples to measure on, always the same ones; None is all that were carved off"""
    epochs: int = 20  # epochs in an episode; with clock compute, decisions
    augment: bool = False  # shift by up to 4 pixels and mirror, drawn anew for every example
    slots: tuple[str, ...] | None = None
    """modules that carry slots, by name or pattern, or ids of the host's own slots; None is all of
    its own
    """
    blueprints: tuple[str, ...] | None = (
        None  # what may be planted; None is every built-in blueprint that fits
    )
    budget: float = 3.0  # most parameters, as a multiple of the host's
    max_seeds: int | None = None
    blends: tuple[str, ...] = BLEND_IDS  # ways to blend that a policy may choose from
    lengths: StageLengths = field(default_factory=StageLengths)
    scale_at_birth: float = 1.0
    prunes: bool = True  # whether fossils that do not pay are removed when the rate has fallen

    def __post_init__(self) -> None:
        for name, least in {"batch": 1, "epochs": 1, "epoch_examples": 1, "held_out": 2}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise SettingError(
                    f"task {self.name}: {name} must be at least {least}, got {value}."
                )
        for name, known in {"optimizer": ("sgd", "adamw"), "clock": ("epochs", "compute")}.items():
            if getattr(self, name) not in known:
                raise UnknownNameError(name, getattr(self, name), known)
        for name, most in {"compute": 1e4, "warmup": 1, "decay": 1}.items():
            if not 0 < (value := getattr(self, name)) <= most:
                raise SettingError(
                    f"task {self.name}: {name} is {value}, but must be above 0 and at "
                    f"most {most:g}."
                )

    def rate_at(self, share: float) -> float:
        """The learning rate when this share of the episode is over.

        It does not depend on actions.
        """
        if self.clock == "compute":
            return warmup_constant_decay(self.lr, share, self.warmup, self.decay)
        return constant_then_cosine(self.lr, share, self.constant_share)

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch or decision: what the plan has in its middle."""
        return self.rate_at((epoch + 0.5) / self.epochs)

    def is_rate_low(self, epoch: int) -> bool:
        """Whether the plan has fallen to a tenth of its peak when this epoch begins, or has no such
        epoch.
        """
        is_rising = epoch + 0.5 < self.warmup * self.epochs
        return epoch >= self.epochs or (is_low(self.rate(epoch), self.lr) and not is_rising)


TASKS: dict[str, Task] = {}


def register_task(task: Task, *, replace: bool = False) -> Task:
    """Enter a task under its name, for the command line and `get_task`."""
    return enter(TASKS, f"task {task.name!r}", task.name, task, replace)


def get_task(name: str) -> Task:
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS, "A task of your own: esper --import FILE.")
    return TASKS[name]


def task_from_datasets(
    name: str,
    train: Examples,
    test: Examples,
    build_host: Callable[[], nn.Module],
    classes: int,
    **settings: Any,
) -> Task:
    """A task from any two map-style data sets of (tensor, label) and any module; `settings` are
    fields of `Task`.

    The examples are stacked into memory once, when a population loads them.
    """

    def load(root: Path | None) -> Splits:
        stacked = stack_examples(train, classes, f"{name}: training set")
        sealed = stack_examples(test, classes, f"{name}: test set")
        parts = [
            part.numpy().tobytes()
            for each in (stacked, sealed)
            for part in (each.inputs, each.targets)
        ]
        corpus = (
            f"{len(stacked):,} and {len(sealed):,} examples, sha256 "
            f"{sha256(b''.join(parts)).hexdigest()[:16]}"
        )
        return Splits(*carve(stacked), SealedSplit(sealed), corpus)

    return Task(
        name,
        f"{name} (your own)",
        "your data sets",
        load,
        build_host,
        chance=1 / classes,
        **settings,
    )


def stack_examples(examples: Examples, classes: int, what: str) -> TensorSplit:
    """All examples of a data set as two tensors; anything that is not (tensor, whole label in
    range) is refused.
    """
    pairs = [examples[index] for index in range(len(examples))]  # type: ignore[arg-type]
    if not pairs:
        raise DataError(f"{what} is empty.")
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise DataError(
            f"{what}: an example is {type(pairs[0]).__name__}, but each must be a "
            f"pair (tensor, label)."
        )
    inputs = [torch.as_tensor(example) for example, _ in pairs]
    if len(shapes := {tuple(example.shape) for example in inputs}) > 1:
        raise DataError(
            f"{what}: examples have different shapes {sorted(shapes)[:3]}; make them equal."
        )
    stacked = torch.stack(inputs)
    stacked = stacked.float() if stacked.is_floating_point() else stacked
    try:
        targets = torch.as_tensor([float(label) for _, label in pairs], dtype=torch.double)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{what}: a label is not one number ({problem}); give each one whole label."
        ) from problem
    if not torch.isfinite(stacked).all():
        raise DataError(f"{what}: some examples hold NaN or Inf; clean them first.")
    if (targets != targets.round()).any() or targets.min() < 0 or targets.max() >= classes:
        allowed = f"classes={classes} allows whole numbers from 0 to {classes - 1}"
        raise DataError(
            f"{what}: labels run from {targets.min():g} to {targets.max():g}, but {allowed}."
        )
    return TensorSplit(stacked, targets.long())


def check_fit(task: Task, splits: Splits) -> None:
    """What would fail in the middle of an epoch fails here:

    a batch larger than the split, outputs that do not fit.
    """
    if task.batch > len(splits.train):
        most = f"its training split of {len(splits.train)} examples"
        raise SettingError(
            f"task {task.name}: a batch of {task.batch} is larger than {most}; lower the batch."
        )
    if task.held_out is not None and task.held_out > (size := len(splits.validation)):
        raise SettingError(
            f"task {task.name}: held_out is {task.held_out}, but the validation split has {size}."
        )
    example = splits.train.example().to("meta")
    try:
        with torch.device("meta"):
            found = task.build_host().eval()(example).shape[-1]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as problem:
        shape = tuple(example.shape[1:])
        raise HostError(
            f"task {task.name}: the host does not run on examples of shape {shape}: {problem}"
        ) from problem
    if task.score is cross_entropy_scores and found < (needed := round(1 / task.chance)):
        raise HostError(
            f"task {task.name}: the host has {found} outputs for {needed} classes; "
            f"give its head {needed}."
        )


def _linear_host() -> ChainHost:
    """Two linear layers: a linear map however it is trained."""
    host = build_mlp_host(inputs=2, widths=(8, 8), classes=2)
    for block in host.blocks:
        assert isinstance(block, nn.Sequential)
        del block[1]
    return host


_OFFICIAL = "official files under --data-root"
_TEXT: dict[str, Any] = {
    "chance": 1 / 256,
    "optimizer": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.01,
    "batch": 64,
}
_TEXT |= {"epoch_examples": 4096, "clip_norm": 1.0, "budget": 2.0, "lengths": StageLengths(ramp=3)}
_TEXT |= {"blueprints": ("copy", "lora", "mlp_small", "mlp", "attention", "norm")}
_TEXT |= {
    "build_host": partial(
        build_transformer_host, vocabulary=256, width=64, layers=2, context=64, slots=2
    )
}


def _code(name: str, summary: str, sizes: tuple[int, int, int, int], **settings: Any) -> Task:
    """A byte GPT of 2 blocks that grows to at most 8 by copies; 1.0 of compute is 8 blocks for so
    many steps.

    `sizes` are its width, its context, the bytes of the corpus, and these steps.
    """
    width, context, size, steps = sizes
    host = partial(build_transformer_host, vocabulary=256, width=width, context=context)
    load = partial(data.load_code, context=context, size=size)
    own = {
        "build_host": partial(host, layers=2, slots=2),
        "blueprints": ("copy", "copy_zero"),
        "clock": "compute",
    }
    own |= {
        "reference": (partial(host, layers=8, slots=8), steps * settings["batch"]),
        "lr": 1e-3,
        "beta2": 0.95,
    }
    own |= {
        "lengths": StageLengths(ramp=0)
    }  # copies at full strength from their first step did best in prototypes
    return Task(name, summary, "this Python", load, **{**_TEXT, **own, **settings})


_IMAGE: dict[str, Any] = {"source": _OFFICIAL, "chance": 0.1, "batch": 256, "lr": 0.2}
# a seed at full strength from its first epoch harms a trained host: +2.0 points on CIFAR-10, raised
# so +4.9
_IMAGE |= {"lengths": StageLengths(ramp=3), "scale_at_birth": 0.3}
_PHOTO: dict[str, Any] = {**_IMAGE, "load": data.load_cifar10, "augment": True}
_RESNET: dict[str, Any] = {**_PHOTO, "lr": 0.4, "budget": 3.3, "build_host": build_resnet_host}
_RESNET |= {
    "slots": ("r0c1", "r0c3", "r0c5"),
    "blueprints": ("copy_zero", "copy"),
}  # the last block of each stage
_CLOTHES: dict[str, Any] = {**_IMAGE, "load": data.load_fashion_mnist}
_CLOTHES |= {"build_host": partial(build_cnn_host, in_channels=1, image_size=28)}
_DIGITS: dict[str, Any] = {"chance": 0.1, "batch": 64, "epochs": 40}
_DIGITS |= {
    "build_host": partial(build_cnn_host, blocks=2, base_channels=4, in_channels=1, image_size=8)
}
_BLOBS: dict[str, Any] = {
    "source": "generated",
    "load": data.load_blobs,
    "build_host": _linear_host,
    "chance": 0.5,
}
_BLOBS |= {"batch": 32, "epochs": 16, "blueprints": ("lora", "mlp"), "budget": 16.0}
_LARGE: dict[str, Any] = {
    "batch": 64,
    "lr": 4e-3,
    "epoch_examples": 9600,
    "held_out": 512,
    "budget": 3.67,
}
_SMALL: dict[str, Any] = {
    "batch": 16,
    "epoch_examples": 320,
    "held_out": 128,
    "budget": 2.8,
    "epochs": 10,
}
for _task in (
    Task(
        "digits",
        "8 x 8 handwritten digits, 2-block CNN",
        "scikit-learn",
        data.load_digits,
        **_DIGITS,
    ),
    Task("blobs", "sign of x * y in a square: a linear host cannot, one MLP seed can", **_BLOBS),
    _code("code", "Python sources, bytes, GPT of 2 blocks", (256, 256, 2**26, 3000), **_LARGE),
    _code("code_tiny", "the same in small, for a CPU", (32, 32, 2**20, 400), **_SMALL),
    Task(
        "python_text",
        "source of the standard library, bytes",
        "this Python",
        data.load_python_text,
        **_TEXT,
    ),
    Task("shakespeare", "tinyshakespeare, bytes", _OFFICIAL, data.load_shakespeare, **_TEXT),
    Task("tinystories", "TinyStories, bytes", _OFFICIAL, data.load_tinystories, **_TEXT),
    Task("fashion_mnist", "28 x 28 articles of clothing, 3-block CNN", **_CLOTHES),
    Task("cifar10", "32 x 32 photographs, 3-block CNN", build_host=build_cnn_host, **_PHOTO),
    Task(
        "cifar10_deep",
        "32 x 32 photographs, 5-block CNN",
        build_host=partial(build_cnn_host, blocks=5),
        **_PHOTO,
    ),
    Task("cifar10_resnet", "32 x 32 photographs, ResNet of 6 blocks", **_RESNET),
):
    register_task(_task)
