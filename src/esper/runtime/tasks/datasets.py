"""A task from a user's own data sets: two sets of (tensor, label), stacked into memory."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.errors import DataError
from esper.runtime.splits import SealedSplit, Splits, TensorSplit, carve
from esper.runtime.tasks.task import Task

Examples = torch.utils.data.Dataset[tuple[Tensor, int]]


def task_from_datasets(
    name: str,
    train: Examples,
    test: Examples,
    build_host: Callable[[], nn.Module],
    classes: int,
    **settings: Any,
) -> Task:
    """Build a task from two map-style data sets of (tensor, label) and any module.

    The examples are stacked into memory once, when a population loads them. A part of the training
    set is carved off for validation.

    Args:
        name: what the command line and saves call the task.
        train: examples to learn from.
        test: examples that are read once, for the final report.
        build_host: builds a newborn host with `classes` outputs.
        classes: how many labels there are; labels are whole numbers from 0 on.
        settings: any other fields of `Task`, such as `epochs` or `batch`.

    >>> import torch, esper
    >>> from torch.utils.data import TensorDataset
    >>> points = torch.rand(100, 2, generator=torch.Generator().manual_seed(0))
    >>> examples = TensorDataset(points, (points.sum(1) > 1).long())
    >>> build_host = lambda: torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 2))
    >>> task = esper.task_from_datasets("sums", examples, examples, build_host, classes=2, batch=16)
    >>> splits = task.load(None)
    >>> len(splits.train), len(splits.validation)
    (85, 15)
    """

    def load(root: Path | None) -> Splits:
        seen = stack_examples(train, classes, f"{name}: training set")
        sealed = stack_examples(test, classes, f"{name}: test set")
        kept, held_out = carve(seen)
        return Splits(kept, held_out, SealedSplit(sealed), _describe_corpus(seen, sealed))

    return Task(
        name=name,
        summary=f"{name} (your own)",
        source="your data sets",
        load=load,
        build_host=build_host,
        chance=1 / classes,
        **settings,
    )


def _describe_corpus(seen: TensorSplit, sealed: TensorSplit) -> str:
    """Sizes and digest of all examples: a run continues with the same ones only."""
    digest = sha256()
    for tensor in (seen.inputs, seen.targets, sealed.inputs, sealed.targets):
        digest.update(tensor.numpy().tobytes())
    return f"{len(seen):,} and {len(sealed):,} examples, sha256 {digest.hexdigest()[:16]}"


def stack_examples(examples: Examples, classes: int, what: str) -> TensorSplit:
    """Return all examples of a data set as two tensors.

    Anything that is not (tensor, whole label in range) is refused.
    """
    pairs = [examples[index] for index in range(len(examples))]  # type: ignore[arg-type]
    if not pairs:
        raise DataError(f"{what} is empty.")
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise DataError(
            f"{what}: an example is {type(pairs[0]).__name__}, but each must be a pair "
            "(tensor, label)."
        )
    inputs = _stack_inputs([torch.as_tensor(example) for example, _ in pairs], what)
    targets = _stack_labels([label for _, label in pairs], what)
    if not torch.isfinite(inputs).all():
        raise DataError(f"{what}: some examples hold NaN or Inf; clean them first.")
    if (targets != targets.round()).any() or targets.min() < 0 or targets.max() >= classes:
        raise DataError(
            f"{what}: labels run from {targets.min():g} to {targets.max():g}, but "
            f"classes={classes} allows whole numbers from 0 to {classes - 1}."
        )
    return TensorSplit(inputs, targets.long())


def _stack_inputs(inputs: list[Tensor], what: str) -> Tensor:
    """One tensor of all inputs, [examples, ...]; floating point is read as float32."""
    shapes = {tuple(example.shape) for example in inputs}
    if len(shapes) > 1:
        raise DataError(
            f"{what}: examples have different shapes {sorted(shapes)[:3]}; make them equal."
        )
    stacked = torch.stack(inputs)
    return stacked.float() if stacked.is_floating_point() else stacked


def _stack_labels(labels: list[Any], what: str) -> Tensor:
    """One tensor of all labels, [examples], in float64: whether they are whole is seen later."""
    try:
        return torch.as_tensor([float(label) for label in labels], dtype=torch.double)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{what}: a label is not one number ({problem}); give each one whole label."
        ) from problem
