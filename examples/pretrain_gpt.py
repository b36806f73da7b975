"""Pretrain a GPT once and take three sizes home: it gets deeper as compute is spent.

    python examples/pretrain_gpt.py --text my.txt
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --text my.txt

Without --text it reads the Python sources of this installation. Two minutes on one CPU core. The
rate is constant; each size is a fork whose rate falls, while the run itself continues.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import esper

TAKE = (0.25, 0.6, 1.0)  # shares of the tokens at which a size is taken home
DECAY = 0.25  # tokens of a decay, as a share of those before it


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.mix = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for output in (self.mix, self.down):
            nn.init.zeros_(output.weight)

    def forward(self, x: Tensor) -> Tensor:
        inside = norm(x)
        query, key, value = (
            part(inside).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        query, key = rotate(norm(query)), rotate(norm(key))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = norm(self.token(tokens[:, :-1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def read(path: Path | None, most: int) -> Tensor:
    paths = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text = bytearray()
    for path in paths:
        text += path.read_bytes() if len(text) < most else b""
    return torch.frombuffer(text, dtype=torch.uint8)


class Data:
    """Random windows of a text, the same on all processes; each takes its share."""

    def __init__(self, text: Tensor, context: int, rows: int, rank: int, size: int):
        self.held_out, self.text = text[: len(text) // 20], text[len(text) // 20 :]
        self.context, self.rows, self.rank, self.size = context, rows, rank, size
        self.numbers = torch.Generator().manual_seed(0)

    def batch(self) -> Tensor:
        last = len(self.text) - self.context
        starts = torch.randint(last, (self.rows, 1), generator=self.numbers)
        return self.text[starts + torch.arange(self.context + 1)].long()[self.rank :: self.size]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        windows = self.held_out.unfold(0, self.context + 1, self.context)[:256]
        parts = [model(part.long()) * len(part) for part in windows.split(64)]
        return float(sum(parts)) / len(windows)


def train_step(call: nn.Module, optimizers: list[torch.optim.Optimizer], tokens: Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    call(tokens).backward()
    for optimizer in optimizers:
        optimizer.step()


def take_home(call, optimizers, data: Data, steps: int, folder: Path) -> None:
    """Fork, let the rate fall to zero, save; the run itself knows nothing of it."""
    small, optimizers = esper.fork(call, optimizers)
    rates = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for optimizer in optimizers
    ]
    for _ in range(steps):
        train_step(small, optimizers, data.batch())
        for rate in rates:
            rate.step()
    plain = small.module if isinstance(small, DistributedDataParallel) else small
    layers = len(plain.blocks)
    if data.rank == 0:
        path = folder / f"gpt-{layers}-layers.pt"
        torch.save({"layers": layers, "model": plain.state_dict()}, path)
        print(f"{layers} layers taken home: {data.loss(plain):.4f} nats, {path}", flush=True)


def main(options: argparse.Namespace) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        distributed.init_process_group("gloo")
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    text = read(options.text, options.most_bytes)
    data = Data(text, options.context, options.rows, rank, size)

    model = GPT(layers=2, width=options.width, heads=options.width // 32)
    matrices = list(model.blocks.parameters())
    others = [*model.token.parameters(), *model.head.parameters()]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0),
    ]
    if options.compile:
        esper.compile_layers(model, "blocks")
    call = DistributedDataParallel(model) if size > 1 else model
    step_tokens = options.rows * options.context
    steps = options.tokens // step_tokens
    total = steps * step_tokens
    depth = esper.DepthSchedule(call, optimizers, layers="blocks", to=options.to, total=total)

    marks = {round(share * steps) for share in TAKE}
    for step in range(1, steps + 1):
        train_step(call, optimizers, data.batch())
        if step in marks:
            take_home(call, optimizers, data, max(1, round(DECAY * step)), options.folder)
        if depth.step(tokens=step_tokens) and rank == 0:
            print(f"{depth.tokens:,} tokens: {depth.depth} layers", flush=True)
    if size > 1:
        del call, depth  # before their group: see docs/processes.md
        distributed.destroy_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a file of your own; its bytes are the tokens")
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain_gpt"))
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--to", type=int, default=4, help="layers in the end")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="windows per step, of all processes")
    parser.add_argument("--most-bytes", type=int, default=2**24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile layer by layer")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
