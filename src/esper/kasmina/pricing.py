"""What a host, a seed or a copy costs in FLOPs: the only place that counts them.

A multiplication and an addition are two FLOPs; all numbers are of one example.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.probing import Example, batch_size, call_with, undisturbed


def count_flops(call: Callable[[], object]) -> int:
    """FLOPs of one call."""
    mapping = {
        torch.ops.aten.convolution_backward: _convolution_backward,
        torch.ops.aten.mkldnn_rnn_layer: _lstm,
        torch.ops.aten.mkldnn_rnn_layer_backward: _lstm_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    # the CPU's fused attention is not counted
    with sdpa_kernel(SDPBackend.MATH), counter:
        call()
    return int(counter.get_total_flops())


def _lstm(inputs, weights, recurrent, *_, **__):  # type: ignore[no-untyped-def]
    """FLOPs of an LSTM as a CPU runs it, which torch does not count, from shapes."""
    return 2 * math.prod(inputs[:-1]) * (math.prod(weights) + math.prod(recurrent))


def _lstm_backward(*shapes, **options):  # type: ignore[no-untyped-def]
    """FLOPs of that LSTM's gradients: two forward passes."""
    return 2 * _lstm(*shapes, **options)


def _convolution_backward(  # type: ignore[no-untyped-def]
    gradient,
    inputs,
    weights,
    _bias,
    _stride,
    _padding,
    _dilation,
    transposed,
    _output_padding,
    _groups,
    wanted,
    **_,
):
    """FLOPs of a convolution's gradients, from shapes.

    Torch counts the gradient of grouped weights as if they were not grouped: for a depthwise
    convolution that is a factor of its channels. Each gradient takes as many products as the
    forward pass.
    """
    positions = inputs[2:] if transposed else gradient[2:]
    products = gradient[0] * math.prod(positions) * math.prod(weights)
    return 2 * products * (wanted[0] + wanted[1])


@dataclass(frozen=True)
class BackwardFlops:
    """How a seed's backward pass differs from two forward passes."""

    entry: int = 0
    """saved where no gradient of its input is needed"""
    mixing: int = 0
    """of products of features with features, which frozen weights do not save"""


def count_backward(
    module: nn.Module, run: Callable[[Tensor], Tensor], features: Tensor
) -> BackwardFlops:
    """Count backward passes of a module on these features; nothing of it changes."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    try:
        with torch.enable_grad():
            # of channels-last features torch crashes in the gradients of a group norm's weights
            inputs = features.detach().clone(memory_format=torch.contiguous_format)
            inputs.requires_grad_()
            outputs: list[Tensor] = []
            forward = count_flops(lambda: outputs.append(run(inputs.clone())))
            loss = outputs[0].sum()
            both = _count_gradients(loss, [inputs, *weights])
            of_weights = _count_gradients(loss, weights)
            of_inputs = _count_gradients(loss, [inputs])
    except Exception:  # a user's module may run forward only; it is then charged two passes
        return BackwardFlops()
    return BackwardFlops(entry=max(0, both - of_weights), mixing=max(0, of_inputs - forward))


def _count_gradients(loss: Tensor, targets: Sequence[Tensor]) -> int:
    """FLOPs of the gradients of these tensors; the graph stays."""
    if not targets or not loss.requires_grad:
        return 0
    find_gradients = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    return count_flops(lambda: find_gradients(loss, targets))


@dataclass(frozen=True)
class HostFlops:
    """FLOPs of one example through a bare host."""

    whole: int
    """forward"""
    after: dict[str, int] = field(default_factory=dict)
    """forward from each slot on; empty where every counterfactual costs a whole pass"""
    learnt: int = 0
    """forward and backward; the first layer needs no gradient of its input"""
    back: dict[str, int] = field(default_factory=dict)
    """backward from the output to each slot, no weight's gradient counted"""

    @staticmethod
    def of_task(
        build_host: Callable[[], nn.Module], example: Tensor, is_cut: bool = True
    ) -> "HostFlops":
        """Count the host of a task without memory; from each slot on only if `is_cut`.

        `example` needs two examples at least: batch norm that always takes the statistics of the
        batch refuses one value per channel, in evaluation mode too.
        """
        counted = _count_built(build_host, example.shape, example.dtype, is_cut)
        return counted.shared_among(len(example))

    @staticmethod
    def of_model(
        model: nn.Module, example: Example, sites: Mapping[str, nn.Module]
    ) -> "HostFlops | None":
        """Count any model on an example batch; None where that cannot be done.

        `sites` are the modules that slots sit on. What is frozen now counts as frozen.
        """
        size = batch_size(example)
        try:
            with undisturbed(model):
                whole = count_flops(partial(call_with, model, example)) // size
        except Exception:  # a dispatch mode cannot run everything that a model may hold
            return None
        try:
            with undisturbed(model):
                counted = _count_host(model, partial(call_with, model, example), sites)
        except Exception:  # forward only: a backward pass counts as two forward passes
            return HostFlops(whole, learnt=3 * whole)
        return replace(counted.shared_among(size), whole=whole)

    def shared_among(self, examples: int) -> "HostFlops":
        """What each of so many examples costs, where all of them together cost this."""
        return HostFlops(
            whole=self.whole // examples,
            after={slot_id: flops // examples for slot_id, flops in self.after.items()},
            learnt=self.learnt // examples,
            back={slot_id: flops // examples for slot_id, flops in self.back.items()},
        )


# many populations of one task are built in a process, and counting takes longer than building
@cache
def _count_built(
    build_host: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype, is_cut: bool
) -> HostFlops:
    """Count a host that is built on the meta device, without memory."""
    with torch.device("meta"):
        host = build_host()
        example = torch.zeros(shape, dtype=dtype)
        sites: dict[str, nn.Module] = {}
        after: dict[str, int] = {}
        host.eval()
        if is_cut and isinstance(host, SegmentedHost):
            for slot_id, name in host.slot_config().modules.items():
                sites[slot_id] = host.get_submodule(name)
                with torch.no_grad():
                    features = host.forward_to_segment(slot_id, example)
                    finish = partial(host.forward_from_segment, slot_id, features)
                    after[slot_id] = count_flops(finish)
        counted = _count_host(host, partial(host, example), sites)
        return replace(counted, after=after)


def _count_host(
    host: nn.Module, run: Callable[[], Any], sites: Mapping[str, nn.Module]
) -> HostFlops:
    """FLOPs of one call, of its backward pass, and of the way back to each site."""
    features: dict[str, list[Tensor]] = {slot_id: [] for slot_id in sites}

    def keep(slot_id: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:  # a frozen host: a seed there needs a way back all the same
            output = output.detach().requires_grad_()
        features[slot_id].append(output)
        return output

    outputs: list[Any] = []
    with torch.enable_grad(), ExitStack() as hooks:
        for slot_id, site in sites.items():
            hooks.enter_context(site.register_forward_hook(partial(keep, slot_id)))
        whole = count_flops(lambda: outputs.append(run()))
        loss = _sum_outputs(outputs)
        weights = [weight for weight in host.parameters() if weight.requires_grad]
        backward = _count_gradients(loss, weights)
        back = {slot_id: _count_gradients(loss, kept) for slot_id, kept in features.items()}
    return HostFlops(whole, learnt=whole + backward, back=back)


def _sum_outputs(outputs: object) -> Tensor:
    """One number that depends on all that a host returns."""
    total = torch.zeros(())
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            total = total.to(leaf.device) + leaf.sum()
    return total
