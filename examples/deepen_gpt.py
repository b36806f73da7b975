"""Deepen your own GPT while it trains; what else would the same FLOPs have bought? (bytes of Python's own sources)"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import esper

ARMS = ("left alone", "deep from the start", "random blocks", "copies")
WIDTH, CONTEXT, BATCH = 64, 64, 16


class GPT(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(new_block() for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, mask = (
            self.token(tokens[:, :-1]) + self.place.weight,
            nn.Transformer.generate_square_subsequent_mask(CONTEXT),
        )
        for block in self.blocks:
            x = block(x, src_mask=mask.to(x), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def step_flops(self) -> int:
        """Forward and backward of all matrix products, those of attention included."""
        weights = sum(weight.numel() for part in (self.blocks, self.head) for weight in part.parameters())
        return 6 * BATCH * CONTEXT * (weights + 2 * len(self.blocks) * CONTEXT * WIDTH)


def new_block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)


def train(arm: str, seed: int, text: torch.Tensor, flops: float, start: int, to: int, at: float) -> GPT:
    torch.manual_seed(seed)
    model, order, used = GPT(to if arm == ARMS[1] else start).to(text.device), torch.Generator().manual_seed(seed), 0.0
    optimizer = torch.optim.AdamW(model.parameters())
    while used < 1:  # the share of the FLOPs that is spent
        if arm in ARMS[2:] and used >= at and len(model.blocks) == start:
            old = set(model.blocks)
            esper.deepen(model, to, optimizer=optimizer)
            for block in set(model.blocks) - old if arm == "random blocks" else ():
                block.load_state_dict(new_block().state_dict())
                nn.init.zeros_(block.self_attn.out_proj.weight), nn.init.zeros_(block.linear2.weight)
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=order)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, 0.02 + 30 * used, 5 * (1 - used))
        optimizer.zero_grad()
        model(text[(starts + torch.arange(CONTEXT + 1)).to(text.device)]).backward()
        optimizer.step()
        used += model.step_flops() / flops
    return model.eval()


def main(gflops: float, start: int, to: int, at: float, seeds: int, device: str) -> None:
    files = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    parts = [file for number, file in enumerate(files) if number % 10], files[::10]
    text, rest = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8).long().to(device) for p in parts)
    held_out = rest[: 4096 * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for seed in range(seeds):
            model = train(arm, seed, text, gflops * 1e9, start, to, at)
            with torch.no_grad():
                losses[arm].append(float(model(held_out)))
        print(f"{arm:20} {sum(losses[arm]) / seeds:.4f} nats", *(f"{loss:.4f}" for loss in losses[arm]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"gflops": 1200.0, "start": 2, "to": 4, "at": 0.3, "seeds": 5, "device": "cpu"}
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    main(**vars(parser.parse_args()))
