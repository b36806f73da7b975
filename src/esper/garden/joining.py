"""Copies of layers join the optimisers that train their originals, without history.

The state of all other parameters is never touched. No optimiser is made or stepped here.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from esper.kasmina.copies.membership import Member
from esper.leyline.errors import OptimizerError

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
"""One optimiser or several, as `esper.deepen` and `esper.DepthSchedule` take them."""


def list_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """One optimiser or several as a list; what is none, or cannot follow, is refused."""
    is_one = isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Iterable)
    listed = [optimizers] if is_one or isinstance(optimizers, str) else list(optimizers)
    for optimizer in listed:
        # some make the state of a parameter when they are built, and would have none for a new one
        inner = getattr(optimizer, "optimizer", optimizer)
        makes_state_early = isinstance(inner, torch.optim.Adagrad | torch.optim.LBFGS)
        if makes_state_early or not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                f"{type(inner).__name__} cannot take up new parameters one by one. Use SGD, Adam, "
                f"AdamW or another, or build it after the copies."
            )
    return listed


def require_cover(
    optimizers: Sequence[torch.optim.Optimizer],
    layers: Sequence[tuple[str, nn.Module]],
    shared: Iterable[nn.Parameter] = (),
) -> None:
    """Refuse layers, by name, with a parameter that learns and that no optimiser holds.

    Its copies would stay as they are. `shared` are parameters that no copy has of its own.
    """
    held = {id(parameter) for parameter in shared}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held.update(id(parameter) for parameter in group["params"])
    missing: list[str] = []
    for name, layer in layers:
        for inner, parameter in layer.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                missing.append(f"{name}.{inner}")
    if missing:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise OptimizerError(
            f"{missing[0]}{others} would learn in no optimiser, in copies neither: {names} does "
            f"not hold it. Pass every optimiser, as in optimizer=[muon, adamw], or freeze it with "
            f"requires_grad_(False)."
        )


def join_originals(
    optimizers: Sequence[torch.optim.Optimizer],
    network: nn.Module,
    layout: Sequence[Member],
    old: Sequence[nn.Module],
) -> None:
    """Let copies join the groups of their originals.

    A group that lists its parameters in the network's order still does: it is then the group that
    a network of this depth would have, so that a state that is saved by position fits both.
    """
    originals = {id(parameter) for layer in old for parameter in layer.parameters()}
    numbers = {id(parameter): number for number, parameter in enumerate(network.parameters())}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = group["params"]
            present = {id(parameter) for parameter in members}
            if not present & originals:
                continue
            was_in_order = _is_in_order(members, numbers)
            for member in layout:
                sources = old[member.source].parameters()
                for parameter, source in zip(member.module.parameters(), sources, strict=True):
                    if id(source) in present and id(parameter) not in present:
                        present.add(id(parameter))
                        members.append(parameter)
                        # names that were passed at construction cannot be kept true
                        group.pop("param_names", None)
            if was_in_order:
                members.sort(key=lambda parameter: numbers[id(parameter)])


def _is_in_order(members: Sequence[Any], numbers: dict[int, int]) -> bool:
    """Whether parameters are all the network's and stand in its order."""
    positions = [numbers.get(id(parameter), -1) for parameter in members]
    return -1 not in positions and positions == sorted(positions)
