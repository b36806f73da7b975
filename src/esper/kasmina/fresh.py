"""Fresh weights for a structure that exists: modules draw again, seeds are built again.

It serves controls: the same network, never trained. Nothing here changes a structure.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.copies.copying import Copy
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import has_gate
from esper.leyline.errors import HostError

Build = Callable[[], nn.Module]
"""A function that returns the host as it is before it has learnt anything."""


@torch.no_grad()
def draw_again(network: nn.Module) -> None:
    """Let every module draw its weights again, as it did when it was built.

    Torch's modules do it by `reset_parameters`. A network that has `_init_weights`, as those of
    transformers and many others have, then gets to see each of its modules. What neither of them
    writes to is refused: it would stay trained.
    """
    trained = {name: value.detach().clone() for name, value in network.named_parameters()}
    silent: set[str] = set()
    # the parts of a module draw before it does, as in its constructor
    for name, module in reversed(list(network.named_modules())):
        if not _reset(module):
            prefix = f"{name}." if name else ""
            silent |= {f"{prefix}{key}" for key in module._parameters}
    initialise = getattr(network, "_init_weights", None)
    if callable(initialise):
        network.apply(initialise)
    for name, value in network.named_parameters():
        if name in silent and torch.equal(value, trained[name]):
            raise HostError(
                f"the weights {name!r} cannot be drawn again: their module has no "
                f"reset_parameters, and {type(network).__name__} no _init_weights that writes to "
                f"them. Say how a fresh model is built: garden.control(build=make_model)."
            )


def _reset(module: nn.Module) -> bool:
    """Let one module draw its own weights; whether it can, or has none."""
    if not module._parameters:
        return True
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            try:
                reset()
            except TypeError:  # one that wants to be told something
                continue
            return True
    return False


@torch.no_grad()
def take_weights(host: nn.Module, fresh: nn.Module) -> None:
    """Give a host the weights and buffers of another one of the same structure."""
    if not isinstance(fresh, nn.Module):
        raise HostError(f"build returned a {type(fresh).__name__}; it must return the bare model.")
    here = _tensors(host)
    there = _tensors(fresh)
    for name in sorted(here.keys() | there.keys()):
        if name not in here or name not in there or here[name].shape != there[name].shape:
            raise HostError(
                f"build returned a {type(fresh).__name__} whose {name!r} differs from that of the "
                f"host that grew. It must build the model as it was before esper.grow."
            )
        here[name].copy_(there[name])


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())


def draw_seeds(model: MorphogeneticModel, build: Build | None) -> None:
    """Put a newborn in the place of every fossil, as strong as seeds are at birth.

    A newborn copy has the weights of a layer of its own: of another model that `build` returns, or
    drawn again.
    """
    for slot in model.ordered_slots:
        for number, name in enumerate(slot.fossil_names):
            fossil = slot.fossils[number]
            strength = model.settings.scale_at_birth
            if isinstance(fossil, Copy) and build is not None:
                with _other_weights(model.host, build()):
                    newborn = model.build_seed(slot.slot_id, name, has_gate(fossil), strength)
            else:
                newborn = model.build_seed(slot.slot_id, name, has_gate(fossil), strength)
            if isinstance(newborn, Copy) and build is None:
                draw_again(newborn.body)
            flags = [parameter.requires_grad for parameter in fossil.parameters()]
            for parameter, learns in zip(newborn.parameters(), flags, strict=True):
                parameter.requires_grad_(learns)
            slot.fossils[number] = newborn


@contextmanager
def _other_weights(host: nn.Module, fresh: nn.Module) -> Iterator[None]:
    """The host has the weights of a fresh one inside, and its own again afterwards."""
    mine = {name: value.detach().clone() for name, value in _tensors(host).items()}
    take_weights(host, fresh)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in _tensors(host).items():
                value.copy_(mine[name])
