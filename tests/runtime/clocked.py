"""Small tasks whose clock is compute:

a GPT and a ResNet that grow by copies, and a CNN with seeds of all kinds.
"""

from dataclasses import replace
from functools import partial

import torch

from esper.kasmina.hosts import build_resnet_host, build_transformer_host
from esper.leyline.lifecycle import StageLengths
from esper.runtime.splits import SealedSplit, Splits, TokenSplit
from esper.runtime.tasks.registry import get_task
from runtime.episodes import IMAGES, QUICK, image_splits


def text_splits(context=16, corpus=None):
    """Made-up text: bytes that count up, with some noise."""
    draw = torch.Generator().manual_seed(3)
    text = (torch.arange(9000) // 3 + torch.randint(3, (9000,), generator=draw)) % 64
    parts = [TokenSplit(part.to(torch.uint8), context) for part in text.split([6000, 1500, 1500])]
    return Splits(parts[0], parts[1], SealedSplit(parts[2]), corpus)


_GPT = partial(build_transformer_host, vocabulary=256, width=16, heads=2, context=16)
TEXT = replace(
    get_task("code"),
    load=lambda root: text_splits(),
    build_host=partial(_GPT, layers=2, slots=2),
    reference=(partial(_GPT, layers=4, slots=4), 60 * 8),
    budget=1.001
    * sum(p.numel() for p in _GPT(layers=8, slots=8).parameters())
    / sum(p.numel() for p in _GPT(layers=2).parameters()),
    batch=8,
    epoch_examples=80,
    held_out=16,
    epochs=8,
)
"""`code` in small: 1.0 of compute is 4 blocks for 60 steps."""
RESNET = replace(
    get_task("cifar10_resnet"),
    load=lambda root: image_splits(160, 32, 3),
    build_host=partial(build_resnet_host, width=4),
    clock="compute",
    batch=16,
    epoch_examples=96,
    held_out=16,
    epochs=8,
    lengths=StageLengths(ramp=1),
)
CNN = replace(
    IMAGES,
    clock="compute",
    compute=3.0,
    held_out=16,
    lengths=QUICK,
    epochs=10,
)
"""`IMAGES`, whose seeds are of all kinds and stay live for a while."""
