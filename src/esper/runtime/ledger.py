"""What a host has cost: FLOPs, examples and seconds by phase. Counted from shapes; nothing here runs on a device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Self

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import Example, batch_size, call_with, undisturbed
from esper.kasmina.slot import SeedSlot, has_gate
from esper.runtime.splits import Split

PHASES = ("training", "shadow", "validation", "counterfactual", "score", "policy")
BACKWARD = 2  # A backward pass costs about two forward passes.


@dataclass(frozen=True)
class PhaseCost:
    examples: int = 0
    flops: int = 0
    seconds: float = 0.0


Charge = tuple[str, int, int]  # Phase, examples, FLOPs of each.


@dataclass
class Ledger:
    phases: dict[str, PhaseCost] = field(default_factory=lambda: dict.fromkeys(PHASES, PhaseCost()))
    peak_params: int = 0

    def copy(self) -> Self:
        return replace(self, phases=dict(self.phases))

    def settle(self, charges: Sequence[Charge], seconds: float) -> None:
        """Charge a span that was timed as a whole: phases share its seconds by FLOPs, by examples, or one has all."""
        examples, first = (
            [count for _, count, _ in charges],
            [int(number == 0) for number in range(len(charges))],
        )
        ways = [count * flops for _, count, flops in charges], examples, first
        weights = next((way for way in ways if any(way)), first)
        for (phase, count, each), weight in zip(charges, weights, strict=True):
            cost, share = self.phases.get(phase, PhaseCost()), seconds * weight / sum(weights)
            self.phases[phase] = PhaseCost(
                cost.examples + count, cost.flops + count * each, cost.seconds + share
            )

    def counts(self) -> dict[str, int]:
        """FLOPs and examples by phase and the largest size: all but seconds, which no two runs share."""
        found = {f"{name}.examples": cost.examples for name, cost in self.phases.items()}
        found |= {f"{name}.flops": cost.flops for name, cost in self.phases.items()}
        return {**found, "peak_params": self.peak_params}

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.phases.values())


@dataclass(frozen=True)
class HostFlops:
    """FLOPs of one example through a bare host: forward whole, forward from each slot on, forward and backward."""

    whole: int
    after: dict[str, int] = field(default_factory=dict)
    """empty where no prefix is shared: every counterfactual then costs a whole pass"""
    learnt: int = 0  # forward and backward; the first layer needs no gradient of its input

    @staticmethod
    def of_task(
        build_host: Callable[[], nn.Module], split: Split, is_cut: bool = True
    ) -> "HostFlops":
        """Counted without memory; from each slot on only if `is_cut`."""
        example = split.example()[:1]
        found = _count_host(build_host, example.shape, example.dtype, is_cut)
        return replace(found, after=dict(found.after))


@cache  # many populations of one task are built in a process, and counting takes longer than building
def _count_host(
    build_host: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype, is_cut: bool
) -> HostFlops:
    with torch.device("meta"):
        host, example = build_host(), torch.zeros(shape, dtype=dtype)
        learnt = _count(lambda: host(example).sum().backward(), learns=True)
        host.eval()
        after: dict[str, int] = {}
        if is_cut and isinstance(host, SegmentedHost):
            for slot_id in host.slot_config().slot_ids:
                with torch.no_grad():
                    features = host.forward_to_segment(slot_id, example)
                after[slot_id] = _count(partial(host.forward_from_segment, slot_id, features))
        return HostFlops(_count(partial(host, example)), after, learnt)


def count_flops(model: nn.Module, example: Example) -> int | None:
    """Forward FLOPs of one example through any model; None where they cannot be counted."""
    try:
        with (
            undisturbed(model),
            sdpa_kernel(SDPBackend.MATH),
        ):  # the CPU's fused attention is not counted
            return _count(partial(call_with, model, example)) // batch_size(example)
    except (
        Exception
    ):  # a dispatch mode cannot run everything that a model may hold; growing needs no FLOPs
        return None


def _count(run: Callable[[], object], learns: bool = False) -> int:
    def lstm(x, own, back, *_, **__):  # type: ignore[no-untyped-def]  # as a CPU runs it, which torch does not count
        return 2 * math.prod(x[:-1]) * (math.prod(own) + math.prod(back))

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: lstm})
    with torch.set_grad_enabled(learns), counter:
        run()
    return int(counter.get_total_flops())


def incubation_flops(slot: SeedSlot) -> int:
    """Forward FLOPs of a seed that trains in the shadow of the host."""
    return slot.prices[str(slot.state.blueprint_id), has_gate(slot.seed)].flops


def _slot_flops(slot: SeedSlot, *, live: bool = True) -> int:
    """Forward FLOPs of a slot's fossils that are on, and of its live seed if it is in the output and `live` asks."""
    if slot.seed is None and not slot.fossil_names:
        return 0
    fossils = enumerate(zip(slot.fossil_names, slot.fossils, strict=True))
    flops = sum(
        slot.prices[name, has_gate(f)].flops
        for number, (name, f) in fossils
        if number not in slot.left_out
    )
    return flops + (
        incubation_flops(slot) if live and slot.is_in_output and slot.seed is not None else 0
    )


def network_flops(model: MorphogeneticModel, host: HostFlops) -> int:
    """Forward FLOPs of one example through the network as it stands."""
    return host.whole + sum(
        _slot_flops(model.slot(slot_id)) for slot_id in model.slot_config.slot_ids
    )


def learning_flops(model: MorphogeneticModel, host: HostFlops) -> int:
    """FLOPs of one example forward and backward through the network as it stands."""
    return host.learnt + (1 + BACKWARD) * (network_flops(model, host) - host.whole)


def score_flops(model: MorphogeneticModel, host: HostFlops) -> int:
    """FLOPs of one example's greedy scores: a pass, its gradients back to the first slot, each slot's products."""
    first, *later = (model.slot(slot_id) for slot_id in model.slot_config.slot_ids)
    back = host.after.get(first.slot_id, host.whole) + sum(map(_slot_flops, later))
    products = sum(2 * slot.channels * math.prod(slot.feature_shape) for slot in (first, *later))
    return network_flops(model, host) + back + products


def ablation_flops(model: MorphogeneticModel, host: HostFlops, slot_id: str) -> int:
    """Extra forward FLOPs of one example to see the network without one seed, shared prefix not counted."""
    ids = model.slot_config.slot_ids
    passed = ids[ids.index(slot_id) :] if slot_id in host.after else ids
    seeds = sum(_slot_flops(model.slot(other), live=other != slot_id) for other in passed)
    return host.after.get(slot_id, host.whole) + seeds
