"""Runs a network as if some of it were not there, or fully there, and puts all back afterwards.

Every function is a context manager. `MorphogeneticModel` offers most of them by slot id.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from esper.kasmina.probing import buffers_kept
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import SeedSlot
from esper.leyline.stages import SeedStage


@contextmanager
def slot_off(slot: SeedSlot) -> Iterator[None]:
    """The network as it would be without this slot's live seed.

    The structure does not change, so a compiled network stays compiled.
    """
    try:
        slot.alpha.fill_(0.0)
        yield
    finally:
        slot.assign(slot.state)


@contextmanager
def bypassed(slot: SeedSlot) -> Iterator[None]:
    """The network as it would be without this slot's live seed, none of which is computed.

    A graph that is captured inside reads no alpha.
    """
    slot.is_in_output = False
    try:
        yield
    finally:
        slot.is_in_output = True


@contextmanager
def fossil_off(slot: SeedSlot, number: int) -> Iterator[None]:
    """The network as it would be without one of this slot's fossils; several may be off at once."""
    left_out = slot.left_out
    try:
        slot.left_out = (*left_out, range(len(slot.fossils))[number])
        yield
    finally:
        slot.left_out = left_out


@contextmanager
def at_full_strength(slot: SeedSlot) -> Iterator[None]:
    """The network with this slot's live seed fully in, whatever its stage."""
    try:
        slot.is_shadowed = slot.seed is not None
        yield
    finally:
        slot.is_shadowed = False


@contextmanager
def shadow(
    network: nn.Module, slots: Sequence[SeedSlot], random_seed: tuple[int, ...]
) -> Iterator[None]:
    """All TRAINING seeds at full strength, all else frozen.

    What is drawn inside comes from `random_seed`. Buffers and the global random state are as before
    afterwards.
    """
    training = [slot for slot in slots if slot.state.stage is SeedStage.TRAINING]
    learning: set[int] = set()
    for slot in training:
        if slot.seed is not None:
            learning.update(id(parameter) for parameter in slot.seed.parameters())
    frozen = [
        parameter
        for parameter in network.parameters()
        if parameter.requires_grad and id(parameter) not in learning
    ]
    devices = {p.device.index for p in network.parameters() if p.device.type == "cuda"}
    try:
        with own_randomness(*random_seed, devices=sorted(devices)), ExitStack() as stack:
            stack.enter_context(buffers_kept(network))
            for parameter in frozen:
                parameter.requires_grad_(False)
            for slot in training:
                stack.enter_context(at_full_strength(slot))
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
