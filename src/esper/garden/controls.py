"""Networks to compare a grown one with: its structure from fresh weights, and its start.

Nothing here changes the garden. How weights are drawn again is in `kasmina.fresh`.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from esper.kasmina.copies.copying import detached_memo
from esper.kasmina.fresh import draw_again, draw_seeds, take_weights
from esper.kasmina.harvesting import harvest
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import remove_slots
from esper.leyline.errors import HostError, SettingError

if TYPE_CHECKING:
    from esper.garden.garden import Garden

Like = Literal["grown", "start"]
Start = dict[str, Tensor]
"""Weights and buffers of a model as `esper.grow` found it, by name."""


def read_start(host: nn.Module) -> Start:
    """A copy of all weights and buffers, in main memory."""
    values: Start = dict(host.named_parameters())
    values |= dict(host.named_buffers())
    return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}


def build_control(
    garden: "Garden", like: Like, build: Callable[[], nn.Module] | None, seed: int
) -> nn.Module:
    """A network to compare the grown one with; `TakingHome.control` explains the options."""
    if like not in ("grown", "start"):
        raise SettingError(f'like is {like!r}; it must be "grown" or "start".')
    model = garden.model
    if like == "start":
        return _rebuild_start(model, garden.start)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    growing = copy.deepcopy(model, detached_memo(model))
    with own_randomness(seed, devices=devices):
        if build is None:
            draw_again(growing.host)
        else:
            take_weights(growing.host, build())
        draw_seeds(growing, build)
    return harvest(growing)


def _rebuild_start(model: MorphogeneticModel, start: Start | None) -> nn.Module:
    """The host as `esper.grow` found it, without slots."""
    if start is None:
        raise HostError(
            "this garden does not keep the start: it was loaded, or grown with keep_start=False. "
            "Build the model again, as before esper.grow."
        )
    host: nn.Module = copy.deepcopy(model, detached_memo(model)).host
    remove_slots(host)
    tensors = dict(host.named_parameters()) | dict(host.named_buffers())
    with torch.no_grad():
        for name, value in start.items():
            tensors[name].copy_(value)
    return host
