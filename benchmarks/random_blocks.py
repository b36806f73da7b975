"""The blueprint `random_block_zero`.

A block of the host's shape with random weights, which adds nothing at first. It is what a copy of a
block is compared with. Importing this module registers it.
"""

from collections.abc import Callable

import torch
from torch import nn

from esper.kasmina.blueprints import blueprint
from esper.kasmina.copies.copying import Copy, Site, plain_copy, silence
from esper.kasmina.randomness import own_randomness

BLOCK_ZERO = "random_block_zero"


def start_afresh(module: nn.Module) -> None:
    """Draw every weight again, as its layer does at first."""
    device = next(module.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    # a seed's own random numbers are on the CPU; the GPU's would be whatever was drawn there before
    with own_randomness(int(torch.randint(2**31, ())), devices=devices):
        for part in module.modules():
            reset = getattr(part, "reset_parameters", None)
            if isinstance(reset, Callable):
                reset()
            elif part._parameters:
                raise SystemExit(
                    f"{type(part).__name__} has weights and no reset_parameters(); "
                    "it would stay a copy."
                )


def random_block_zero(channels: int, site: Site) -> Copy:
    """A copy of the block with its weights drawn again and its last layers zeroed."""
    if not site.zeroed:
        raise ValueError("no layers of this block make it the identity")
    seed = plain_copy(channels, site)
    start_afresh(seed.body)
    for name, value in site.zeroed.items():
        silence(seed.body.get_submodule(name), value)
    return seed


for _kind in ("image", "sequence"):
    blueprint(_kind, BLOCK_ZERO, depth=2.0)(random_block_zero)
