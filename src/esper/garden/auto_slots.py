"""Where a model can grow, when its user does not say: in repeated blocks first, else after layers.

What fits a slot is judged in `kasmina.probing`; nothing here plants or changes anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from esper.kasmina.effects import find_idle
from esper.kasmina.probing import Example, Place
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import HostError

AUTO = "auto"
"""What `slots` says when Esper is to choose."""
MOST = 4
"""Slots that are chosen at most."""
_LARGE = 0.3
"""Blocks count as the model's own where they have this share of the parameters of the largest."""


@dataclass(frozen=True)
class Choice:
    """The modules that get a slot, and what they are, in words."""

    names: list[str]
    reason: str

    def __str__(self) -> str:
        return (
            f"esper.grow chose {len(self.names)} slots: {', '.join(self.names)} ({self.reason}). "
            f"Name others with slots=[...]; esper.inspect(model, example) lists them."
        )


def choose_slots(model: nn.Module, example: Example, places: Sequence[Place]) -> Choice:
    """Up to `MOST` modules where a seed could have an effect, spread over the depth of the model.

    Repeated blocks of one class come first: of those that hold many parameters, the outermost. A
    model without them gets its slots where its layers end, the last layer left out: its output is
    the answer, not a feature.
    """
    choice = _choose(model, places)
    idle = find_idle(model, example, choice.names)
    while idle:
        places = [place for place in places if place.name not in idle]
        choice = _choose(model, places)
        idle = find_idle(model, example, choice.names)
    return choice


def _choose(model: nn.Module, places: Sequence[Place]) -> Choice:
    """The slots that the places offer, whatever a seed there could do; none is an error."""
    blocks = _find_blocks(model, places)
    if blocks:
        kind = type(model.get_submodule(blocks[0])).__name__
        return Choice(_spread(blocks), f"of {len(blocks)} {kind} blocks")
    ends = _find_layer_ends(model, places)
    if ends:
        return Choice(_spread(ends), f"of {len(ends)} layers")
    raise HostError(
        f"no place in {type(model).__name__} is one that Esper would choose for a slot: it has no "
        f"repeated blocks, and no layer before its last one has an output that fits. "
        f"esper.inspect(model, example) says why; name one with slots=[...]."
    )


def _find_blocks(model: nn.Module, places: Sequence[Place]) -> list[str]:
    """The repeated blocks that fit, in the order of execution; empty without any.

    Blocks are alike members of lists at the same depth: the stages of a ResNet count together.
    """
    fitting = {place.name for place in places if place.problem is None}
    groups: dict[tuple[type[nn.Module], int], list[str]] = {}
    for list_name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for key, member in module.named_children():
            name = f"{list_name}.{key}".lstrip(".")
            is_block = any(True for _ in member.children()) and count_parameters(member) > 0
            if is_block and name in fitting:
                groups.setdefault((type(member), name.count(".")), []).append(name)
    sizes: dict[tuple[type[nn.Module], int], int] = {}
    for group, names in groups.items():
        if len(names) > 1 and not issubclass(group[0], nn.Sequential):
            sizes[group] = sum(count_parameters(model.get_submodule(name)) for name in names)
    if not sizes:
        return []
    largest = max(sizes.values())
    candidates = [group for group, size in sizes.items() if size >= _LARGE * largest]
    chosen = min(candidates, key=lambda group: (group[1], -sizes[group]))
    return [place.name for place in places if place.name in groups[chosen]]


def _find_layer_ends(model: nn.Module, places: Sequence[Place]) -> list[str]:
    """The last module of each layer but the model's last: after its norm and activation, if any.

    A layer begins with a module that holds a matrix of weights itself.
    """
    ends: list[str] = []
    pending: Place | None = None
    for place in places:
        module = model.get_submodule(place.name)
        if any(True for _ in module.children()):
            continue
        is_layer = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        if is_layer:
            if pending is not None:
                ends.append(pending.name)
            pending = place if place.problem is None else None
        elif pending is not None and place.problem is None and place.shape == pending.shape:
            pending = place
    # what is pending now ends the last layer, whose output is the answer
    return ends


def _spread(names: Sequence[str]) -> list[str]:
    """At most `MOST` of the names, the last among them, evenly spread."""
    if len(names) <= MOST:
        return list(names)
    chosen = [int((number + 1) * len(names) / MOST + 0.5) - 1 for number in range(MOST)]
    return [names[index] for index in chosen]
