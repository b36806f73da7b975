"""Deepen your own GPT while it trains; what else would the same FLOPs have bought? (bytes of Python
sources)

An arm takes about a minute on two CPU cores. With 1,200 GFLOP it was better left alone (one seed).
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import esper

ARMS = ("left alone", "deep from the start", "random blocks", "copies")
DEFAULTS = {
    "gflops": 3000.0,
    "start": 2,
    "to": 4,
    "at": 0.5,
    "lr": 3e-3,
    "width": 32,
    "context": 64,
    "batch": 32,
}


class GPT(nn.Module):
    def __init__(self, depth: int, width: int, context: int):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(new_block(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def step_flops(
        self, batch: int
    ) -> int:  # of all matrix products, forward and backward, attention included
        weights = sum(
            weight.numel() for part in (self.blocks, self.head) for weight in part.parameters()
        )
        return (
            6
            * batch
            * len(self.place.weight)
            * (weights + 2 * len(self.blocks) * self.place.weight.numel())
        )


def new_block(width: int) -> nn.Module:
    block = nn.TransformerEncoderLayer(
        width, width // 16, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    for name, weight in block.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(
                weight, std=0.02 if "out_proj" not in name and "linear2" not in name else 0.007
            )
    return block


def train(arm: str, seed: int, text: torch.Tensor, options: argparse.Namespace) -> GPT:
    torch.manual_seed(seed)
    order, used, batch, context = (
        torch.Generator().manual_seed(seed),
        0.0,
        options.batch,
        options.context,
    )
    model = GPT(
        options.to if arm == "deep from the start" else options.start, options.width, context
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    while used < 1:  # the share of the FLOPs that is spent
        if arm in ARMS[2:] and used >= options.at and len(model.blocks) == options.start:
            old = set(model.blocks)
            example = text[None, : context + 1].long()
            esper.deepen(model, options.to, optimizer=optimizer, example=example)
            for block in set(model.blocks) - old if arm == "random blocks" else ():
                block.load_state_dict(new_block(options.width).state_dict())
                (
                    nn.init.zeros_(block.self_attn.out_proj.weight),
                    nn.init.zeros_(block.linear2.weight),
                )
        starts = torch.randint(len(text) - context, (batch, 1), generator=order)
        optimizer.param_groups[0]["lr"] = options.lr * min(1.0, 0.02 + 30 * used, 5 * (1 - used))
        optimizer.zero_grad()
        model(text[starts + torch.arange(context + 1)].long()).backward()
        nn.utils.clip_grad_norm_(
            model.parameters(), 1.0
        )  # a plain copy makes gradients jump, and AdamW remembers
        optimizer.step()
        used += model.step_flops(batch) / options.gflops / 1e9
    return model.eval().requires_grad_(False)


def read(paths: list[Path], most: float) -> torch.Tensor:  # about `most` MiB
    text = bytearray()
    for path in paths:
        text += path.read_bytes() if len(text) < most * 2**20 else b""
    return torch.frombuffer(text, dtype=torch.uint8)


def main(options: argparse.Namespace) -> None:
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text, rest = (
        read([path for number, path in enumerate(paths) if number % 10], 4),
        read(paths[::10], 0.25),
    )
    held_out = (
        rest[: len(rest) // (options.context + 1) * (options.context + 1)]
        .view(-1, options.context + 1)
        .long()
    )
    for arm in ARMS:
        nets = [
            train(arm, options.first + number, text, options) for number in range(options.seeds)
        ]
        losses = [
            sum(float(net(part)) * len(part) for part in held_out.split(256)) / len(held_out)
            for net in nets
        ]
        print(
            f"{arm:20} {sum(losses) / len(losses):.4f} nats",
            *(f"{loss:.4f}" for loss in losses),
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in {**DEFAULTS, "first": 0, "seeds": 1}.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    main(parser.parse_args())
