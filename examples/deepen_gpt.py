"""Deepen your own small GPT from 2 to 8 blocks while it trains, against what else the same FLOPs buy (bytes of code)."""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import esper

ARMS = {"2 blocks, left alone": 2, "8 blocks from the start": 8, "2 -> 8, random blocks": 2, "2 -> 8, copies": 2}


class Block(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix, self.widen = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.second(x))))


class GPT(nn.Module):
    def __init__(self, blocks: int, width: int = 64, context: int = 64):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def step_flops(model: GPT, tokens: torch.Tensor) -> int:
    """Forward and backward of one batch; the CPU's fused attention would not be counted."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).backward()
    return counter.get_total_flops()
