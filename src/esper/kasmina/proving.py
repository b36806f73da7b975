"""Whether a network computes what the growing one does: tried on a batch, in both modes.

The batch is the first one that is known: the example that a model grows from, or, after a save was
loaded, the first batch that runs through it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina import switches
from esper.kasmina.outputs import Output, entries_of, pair_outputs
from esper.kasmina.probing import Example, buffers_kept
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import SeedSlot

MOST_BYTES = 2**24
"""Of a batch, as many rows are kept as fit into this; one at least."""
_HELD = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
_LIKE_DROPOUT = re.compile("DropPath|StochasticDepth")


@dataclass(frozen=True)
class Batch:
    """Rows of a batch, as a model is called with them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of_example(cls, example: Example) -> "Batch":
        """The first rows of an example."""
        if isinstance(example, Mapping):
            return cls.of_call((), dict(example))
        return cls.of_call((example,) if isinstance(example, Tensor) else tuple(example), {})

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Batch":
        """The first rows of what a model was called with."""
        whole = cls(args, kwargs)
        tensors = [leaf for leaf in whole._leaves() if isinstance(leaf, Tensor)]
        row_bytes = sum(_bytes_of(tensor) for tensor in tensors) // max(1, whole.size)
        return whole.first(max(1, MOST_BYTES // max(1, row_bytes)))

    @property
    def size(self) -> int:
        """Rows of the first tensor that has any; 0 without one."""
        tensors = [leaf for leaf in self._leaves() if isinstance(leaf, Tensor)]
        lengths = [tensor.shape[0] for tensor in tensors if not tensor.is_nested and tensor.dim()]
        return lengths[0] if lengths else 0

    def first(self, count: int) -> "Batch":
        """The first rows of every tensor that has a row for each example, as copies."""
        size = self.size

        def cut(tensor: Tensor) -> Tensor:
            rows = tensor[:count] if _has_rows(tensor, size) else tensor
            return rows.detach().clone()

        return Batch(*tree_map_only(Tensor, cut, (self.args, self.kwargs)))

    def another_size(self) -> "Batch":
        """Half of the rows; where there is one row only, this row twice."""
        size = self.size
        if size > 1:
            return self.first(size // 2)

        def double(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor]) if _has_rows(tensor, size) else tensor

        return Batch(*tree_map_only(Tensor, double, (self.args, self.kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Batch":
        """Itself: nothing writes into a batch, and not every tensor can be copied deeply."""
        return self

    def run(self, network: nn.Module) -> Output:
        """What a network gives for these rows, which come to where its weights are."""
        weight = next(network.parameters(), None)
        device = None if weight is None else weight.device

        def move(tensor: Tensor) -> Tensor:
            # a copy, because a network may write into what it is called with
            return tensor.clone().to(device)

        args, kwargs = tree_map_only(Tensor, move, (self.args, dict(self.kwargs)))
        return entries_of(network(*args, **kwargs))

    def _leaves(self) -> list[Any]:
        return tree_leaves((self.args, dict(self.kwargs)))


def _bytes_of(tensor: Tensor) -> int:
    """The memory of a dense tensor; another one is kept whole, so it does not count."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.numel() * tensor.element_size() if is_dense else 0


def _has_rows(tensor: Tensor, size: int) -> bool:
    """Whether a dense tensor has this many rows."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.dim() > 0 and len(tensor) == size


@dataclass(frozen=True)
class Trial:
    """What the growing network gives for a batch, in one mode."""

    batch: Batch
    is_training: bool
    output: Output


def keep_first_batch(model: Any) -> None:
    """Let a model without a sample keep rows of the first batch that it is called with."""
    model.register_forward_pre_hook(_keep_rows, with_kwargs=True)


def _keep_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    model.sample = Batch.of_call(args, kwargs)
    hooks = model._forward_pre_hooks
    key = next(key for key, hook in hooks.items() if hook is _keep_rows)
    del hooks[key], model._forward_pre_hooks_with_kwargs[key]


def record_trials(
    network: nn.Module, slots: Sequence[SeedSlot], sample: Batch | None, training_seed: int = 0
) -> list[Trial]:
    """What a growing network gives without its unfinished seeds, at two sizes and in both modes.

    A trial is left out where the network does not run, or gives something else the second time,
    when random numbers in training mode come from `training_seed`.
    """
    if sample is None:
        return []
    trials = []
    with ExitStack() as stack:
        for slot in slots:
            if slot.is_in_output:
                stack.enter_context(switches.bypassed(slot))
        for batch in (sample, sample.another_size()):
            for is_training in (False, True):
                seed = training_seed if is_training else 0
                try:
                    output = _run_held(network, batch, is_training)
                    repeated = _run_held(network, batch, is_training, seed)
                except Exception:  # whatever a user's network does with other rows than it knows
                    continue
                if output and find_unequal(repeated, output) is None:
                    trials.append(Trial(batch, is_training, output))
    return trials


def find_difference(
    network: nn.Module, trials: Sequence[Trial], *, may_grow: bool = False
) -> str | None:
    """In which trial a network does something else, in words; None if it does the same in all.

    `may_grow` as in `pair_outputs`.
    """
    for trial in trials:
        place = "in training mode" if trial.is_training else "in evaluation mode"
        try:
            output = _run_held(network, trial.batch, trial.is_training)
        except Exception as problem:  # whatever a longer list does to a user's network
            return f"{place} it fails: {type(problem).__name__}: {problem}"
        unequal = find_unequal(output, trial.output, may_grow=may_grow)
        if unequal is not None:
            return f"{place} its output on {trial.batch.size} examples differs{unequal}"
    return None


def find_unequal(output: Output, wanted: Output, *, may_grow: bool = False) -> str | None:
    """By how much the first tensor that differs does so; None if all are equal up to rounding."""
    try:
        pairs = list(pair_outputs(output, wanted, may_grow=may_grow))
    except ValueError as problem:
        return f": {problem}"
    for ours, other in pairs:
        if ours.shape != other.shape:
            return f": shape {tuple(ours.shape)} instead of {tuple(other.shape)}"
        try:
            torch.testing.assert_close(ours, other, equal_nan=True, check_stride=False)
        except AssertionError:
            distance = (ours.to_dense() - other.to_dense()).double().abs().max().item()
            return f" by up to {distance:.2g}"
    return None


def _run_held(network: nn.Module, batch: Batch, is_training: bool, seed: int = 0) -> Output:
    """Run a network in a mode; batch norm and dropout stay in evaluation mode.

    Nothing is compiled for this. Modes, buffers and random state are as before afterwards.
    """
    devices = {p.device.index for p in network.parameters() if p.device.type == "cuda"}
    randomness = own_randomness(seed, devices=sorted(devices))
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.no_grad(), randomness, buffers_kept(network), _held(network, is_training):
        return batch.run(network)


@contextmanager
def _held(network: nn.Module, is_training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    try:
        network.train(is_training)
        for module, _ in modes:
            if isinstance(module, _HELD) or _LIKE_DROPOUT.search(type(module).__name__):
                module.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
