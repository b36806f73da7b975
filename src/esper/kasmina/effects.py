"""Whether what grows at a place could change what the model gives out: found by trying.

Nothing of the model changes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina.probing import (
    Example,
    Place,
    batch_size,
    buffers_kept,
    call_with,
    choose_places,
    resize,
    undisturbed,
)
from esper.kasmina.randomness import own_randomness

_IDLE = (
    "what the model gives out does not change with its output, so nothing that grew there would "
    "have an effect"
)


def choose_effective(
    model: nn.Module, example: Example, places: Sequence[Place], patterns: Sequence[str]
) -> list[Place]:
    """The places that the patterns name and where a seed could have an effect, in order.

    A pattern without such a place is refused.
    """
    chosen = choose_places(model, places, patterns)
    idle = find_idle(model, example, [place.name for place in chosen])
    if not idle:
        return chosen
    judged = [replace(place, problem=_IDLE) if place.name in idle else place for place in places]
    return choose_places(model, judged, patterns)


def find_idle(model: nn.Module, example: Example, names: Sequence[str]) -> set[str]:
    """The modules that could give out anything without a change of what the model gives out.

    One backward pass over a few rows clears most. The others are tried one by one on the whole
    example, without weights at zero, which hide what comes before them until they have learnt.
    """
    rows = resize(example, 2) if batch_size(example) > 2 else example
    with undisturbed(model):
        idle = _without_gradients(model, rows, names)
        if not idle:
            return set()
        with _zeros_filled(model):
            idle = _without_gradients(model, rows, idle)
            for is_training in (False, True):
                idle = _without_movement(model, example, idle, is_training)
    return set(idle)


def _without_gradients(model: nn.Module, rows: Example, names: Sequence[str]) -> list[str]:
    """The modules to whose outputs no gradient comes; all where there are no gradients."""
    probes: dict[str, Tensor] = {}

    def add_probe(name: str, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        probes[name] = torch.zeros_like(output, requires_grad=True)
        return output + probes[name]

    try:
        with torch.enable_grad(), own_randomness(0), ExitStack() as hooks:
            for name in names:
                hook = model.get_submodule(name).register_forward_hook(partial(add_probe, name))
                hooks.enter_context(hook)
            leaves = [leaf for leaf in _tensors(model, rows) if leaf.requires_grad]
            if not leaves:
                return list(names)
            # random weights: the sum of a softmax, or of what is normalised, is always the same
            total = torch.stack([(leaf * torch.randn_like(leaf)).sum().abs() for leaf in leaves])
            gradients = torch.autograd.grad(total.sum(), list(probes.values()), allow_unused=True)
    except Exception:  # whatever a user's model does with gradients
        return list(names)
    moved = {
        name
        for name, gradient in zip(probes, gradients, strict=True)
        if gradient is not None and bool((gradient != 0).any())
    }
    return [name for name in names if name not in moved]


def _without_movement(
    model: nn.Module, example: Example, names: Sequence[str], is_training: bool
) -> list[str]:
    """The modules that can give out something else while what the model gives out stays."""
    model.train(is_training)
    unmoved: list[str] = []
    try:
        with own_randomness(0), buffers_kept(model):
            before = _tensors(model, example) if names else []
        for name in names if before else ():
            hook = model.get_submodule(name).register_forward_hook(_disturb)
            with hook, own_randomness(0), buffers_kept(model):
                if _are_equal(before, _tensors(model, example)):
                    unmoved.append(name)
    except Exception:  # whatever a user's model does with another output of a part
        return []
    return unmoved


def _disturb(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Another output; the model's random numbers are as they are."""
    size = output.float().std(correction=0).nan_to_num().clamp(min=1e-3)
    with own_randomness(1):
        noise = torch.randn(output.shape).to(output.device)
    return output + (noise * size).to(output.dtype)


def _tensors(model: nn.Module, rows: Example) -> list[Tensor]:
    leaves = tree_leaves(call_with(model, rows))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _are_equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether two outputs are the same bit for bit."""
    if len(before) != len(after):
        return False
    for left, right in zip(before, after, strict=True):
        if left.shape != right.shape or not torch.equal(left.nan_to_num(), right.nan_to_num()):
            return False
    return True


@contextmanager
def _zeros_filled(model: nn.Module) -> Iterator[None]:
    """Parameters that are zero throughout have small values inside, and are zero afterwards."""
    zeros = [
        parameter
        for parameter in model.parameters()
        if parameter.is_floating_point() and not bool(parameter.any())
    ]
    try:
        with own_randomness(2), torch.no_grad():
            for parameter in zeros:
                parameter.normal_(std=0.1)
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()
