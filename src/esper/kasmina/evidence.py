"""Turning losses and gradients into evidence. Reads tensors, returns records; decides nothing."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.errors import MeasurementError
from esper.leyline.gates import Measurement


class HeldOutLosses(NamedTuple):
    """One value per held-out example, lower is better."""

    values: Tensor
    sign: float  # -1.0 where scores were turned into losses


def check_values(values: object) -> Tensor:
    """Held-out values as evidence needs them: one finite number per example."""
    if not isinstance(values, Tensor) or not _is_list_of_numbers(values):
        kind = type(values).__name__
        if isinstance(values, Tensor):
            kind = f"tensor {_describe(values)}"
        raise MeasurementError(
            f"evaluate() returned a {kind}. It must return a 1-D torch tensor, one value per "
            f"held-out example: a mean has no standard error; use reduction='none', concatenate "
            f"the batches, and torch.as_tensor for a list."
        )
    if len(values) < 2:
        raise MeasurementError(
            f"evaluate() returned {len(values)} values; a standard error needs two examples."
        )
    values = values.detach().double()
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise MeasurementError(
            f"evaluate() returned NaN or Inf for {bad} of {len(values)} examples: it is broken, or "
            f"the network is. Lower the learning rate or restore an earlier state."
        )
    return values


def _is_list_of_numbers(values: Tensor) -> bool:
    """Whether these are real numbers in a row, in memory that can be read."""
    is_plain = values.layout is torch.strided and not values.is_nested and not values.is_meta
    return is_plain and values.dim() == 1 and not values.is_complex()


def _describe(values: Tensor) -> str:
    """What a tensor is that is no list of numbers, in words."""
    if values.is_nested:
        return "of tensors (nested)"
    kind = str(values.dtype).removeprefix("torch.")
    layout = "" if values.layout is torch.strided else f", {values.layout}"
    return f"of shape {tuple(values.shape)}, {kind}{layout} on {values.device}"


def as_losses(values: object, higher_is_better: bool | None) -> HeldOutLosses:
    """Checked values as losses, on the CPU.

    Where `higher_is_better` does not say, bools are scores and numbers are losses.
    """
    is_score = higher_is_better
    if is_score is None:
        is_score = isinstance(values, Tensor) and values.dtype == torch.bool
    sign = -1.0 if is_score else 1.0
    checked = check_values(values).cpu()
    is_guess = higher_is_better is None and not is_score
    if is_guess and set(checked.unique().tolist()) == {0.0, 1.0}:
        raise MeasurementError(
            "evaluate() returned only zeros and ones, which look like correctness, but numbers "
            "count as losses. Say which it is: esper.grow(..., higher_is_better=True) for scores, "
            "False for losses."
        )
    return HeldOutLosses(checked * sign, sign)


def measure_pairs(*, better: Tensor, than: Tensor) -> Measurement:
    """By how much the first losses are lower, example by example.

    The mean comes with its standard error.
    """
    first = check_values(better)
    second = check_values(than)
    if len(first) != len(second):
        raise MeasurementError(
            f"{len(first)} and {len(second)} held-out values do not pair up; use the same "
            f"examples, in order."
        )
    gain = second - first
    return Measurement(
        mean=float(gain.mean()),
        standard_error=float(gain.std() / math.sqrt(len(gain))),
        examples=len(gain),
    )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Norm over all gradients, on their device; None where there is none."""
    dense: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            dense.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
    return nn.utils.get_total_norm(dense) if dense else None


def gradient_ratio(
    seed_norm: float, seed_size: int, host_norm: float, host_size: int
) -> float | None:
    """Gradient norm per root parameter, seed over host; None where there is nothing to compare."""
    if not seed_size or not host_norm > 0:
        return None
    return (seed_norm / seed_size**0.5) / (host_norm / host_size**0.5)


def score_sites(
    losses: Callable[[], Tensor], sites: Sequence[nn.Module], kinds: Sequence[str]
) -> Tensor:
    """How steeply the mean loss falls at each site, per step of a linear map added there, [sites].

    Every weight of the map takes one step of equal size. That is the sum of |gradient x feature|
    over pairs of channels: sites with more channels offer more directions. `losses` runs the
    network and returns one loss per example, with the features in their graph.
    """
    features_of: list[list[Tensor]] = [[] for _ in sites]
    with torch.enable_grad(), ExitStack() as stack:
        for site, features in zip(sites, features_of, strict=True):
            hook = site.register_forward_hook(partial(_keep, features))  # behind its slot
            stack.enter_context(hook)
        values = losses()
        every_feature = [feature for features in features_of for feature in features]
        gradients = iter(torch.autograd.grad(values.sum(), every_feature, allow_unused=True))
    scores = []
    for kind, features in zip(kinds, features_of, strict=True):
        products = []
        for feature in features:
            gradient = next(gradients)
            if gradient is not None:
                products.append(_channel_products(kind, gradient, feature.detach()))
        score = sum(products[1:], products[0]).abs().sum() if products else values.new_zeros(())
        scores.append(score.double())
    return torch.stack(scores) / len(values)


def _keep(features: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Note an output; the network continues with a copy, which a layer in place may spoil."""
    if torch.is_grad_enabled() and not output.requires_grad:
        # a frozen host's features: a seed there would learn all the same
        output = output.detach().requires_grad_()
    features.append(output)
    return output.clone()


def _channel_products(kind: str, gradient: Tensor, features: Tensor) -> Tensor:
    """Gradient times feature by pair of channels, summed over examples and positions."""
    axis = 1 if kind == "image" else -1
    return _rows_of_channels(gradient, axis).T @ _rows_of_channels(features, axis)


def _rows_of_channels(values: Tensor, axis: int) -> Tensor:
    """Examples and positions as rows: [rows, channels]."""
    return values.movedim(axis, -1).flatten(0, -2).float()
