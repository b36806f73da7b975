"""Turning losses and gradients into evidence. Reads tensors, returns records; decides nothing."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.errors import MeasurementError
from esper.leyline.gates import Measurement


def check_values(values: object) -> Tensor:
    """Held-out values as evidence needs them: one finite number per example."""
    if not isinstance(values, Tensor) or values.dim() != 1:
        got = (
            f"tensor of shape {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else type(values).__name__
        )
        rule = (
            "It must return a 1-D torch tensor, one value per held-out example: a "
            "mean has no standard error"
        )
        way_out = "use reduction='none', concatenate the batches, and torch.as_tensor for a list."
        raise MeasurementError(f"evaluate() returned a {got}. {rule}; {way_out}")
    if len(values) < 2:
        raise MeasurementError(
            f"evaluate() returned {len(values)} values; a standard error needs two examples."
        )
    values = values.detach().double()
    if bad := int((~torch.isfinite(values)).sum()):
        what = (
            f"evaluate() returned NaN or Inf for {bad} of {len(values)} examples: it "
            f"is broken, or the network is"
        )
        raise MeasurementError(f"{what}. Lower the learning rate or restore an earlier state.")
    return values


def as_losses(values: object, higher_is_better: bool | None) -> tuple[Tensor, float]:
    """Checked values, lower is better, and the sign that made them so; bools are scores, unless
    told otherwise.
    """
    is_bool = isinstance(values, Tensor) and values.dtype == torch.bool
    is_score = is_bool if higher_is_better is None else higher_is_better
    checked, sign = check_values(values).cpu(), -1.0 if is_score else 1.0
    if higher_is_better is None and not is_score and set(checked.unique().tolist()) == {0.0, 1.0}:
        way_out = (
            "Say which it is: esper.grow(..., higher_is_better=True) for scores, False for losses."
        )
        problem = (
            "returned only zeros and ones, which look like correctness, but numbers count as losses"
        )
        raise MeasurementError(f"evaluate() {problem}. {way_out}")
    return checked * sign, sign


def measure_pairs(*, better: Tensor, than: Tensor) -> Measurement:
    """By how much the first losses are lower, example by example, with the standard error of that
    mean.
    """
    first, second = check_values(better), check_values(than)
    if (count := len(first)) != (other := len(second)):
        raise MeasurementError(
            f"{count} and {other} held-out values do not pair up; use the same examples, in order."
        )
    gain = second - first
    return Measurement(float(gain.mean()), float(gain.std() / math.sqrt(len(gain))), len(gain))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Norm over all gradients, on their device; None where there is none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    return nn.utils.get_total_norm(dense) if dense else None


def gradient_ratio(
    seed_norm: float, seed_size: int, host_norm: float, host_size: int
) -> float | None:
    """Gradient norm per root parameter, seed over host; None where there is nothing to compare."""
    return (
        (seed_norm / seed_size**0.5) / (host_norm / host_size**0.5)
        if seed_size and host_norm > 0
        else None
    )


def _keep(seen: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Note an output; the network goes on with a copy, which a layer that works in place may
    spoil.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output = (
            output.detach().requires_grad_()
        )  # a frozen host's features: a seed there would learn all the same
    seen.append(output)
    return output.clone()


def score_sites(
    losses: Callable[[], Tensor], sites: Sequence[nn.Module], kinds: Sequence[str]
) -> Tensor:
    """How steeply the mean loss falls when every weight of a linear map added at a site takes one
    step of equal size.

    That is the sum of |gradient x feature| over pairs of channels: places with more channels offer
    more directions. `losses` runs the network and returns one loss per example, with the features
    in their graph.
    """
    seen: list[list[Tensor]] = [[] for _ in sites]
    with torch.enable_grad(), ExitStack() as stack:
        for site, own in zip(sites, seen, strict=True):
            stack.enter_context(site.register_forward_hook(partial(_keep, own)))  # behind its slot
        values = losses()
        features = [value for own in seen for value in own]
        gradients = iter(torch.autograd.grad(values.sum(), features, allow_unused=True))
    scores = []
    for kind, own in zip(kinds, seen, strict=True):
        products = [
            _channel_products(kind, gradient, value.detach())
            for value, gradient in zip(own, gradients, strict=False)
            if gradient is not None
        ]
        score = sum(products[1:], products[0]).abs().sum() if products else values.new_zeros(())
        scores.append(score.double())
    return torch.stack(scores) / len(values)


def _channel_products(kind: str, gradient: Tensor, features: Tensor) -> Tensor:
    """Channel by channel, summed over examples and positions."""
    axis = 1 if kind == "image" else -1
    left, right = (value.movedim(axis, -1).flatten(0, -2).float() for value in (gradient, features))
    return left.T @ right
