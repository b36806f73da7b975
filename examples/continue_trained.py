"""A trained model gets K more epochs: grown, sham-grown, or kept training, all at one learning-rate plan."""

import argparse
import copy
import json
import math
import statistics
from pathlib import Path

import torch

import esper
from esper.kasmina import build_cnn_host
from esper.runtime.data import load_digits, load_fashion_mnist
from esper.runtime.training import held_out_losses, score, train_epoch
from esper.tamiyo import replay


def train(garden, data, epochs, seed):
    """SGD at a rate that is constant for half of the epochs and then falls along a cosine."""
    optimizer = torch.optim.SGD(garden.parameters(), 0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: min(1.0, 1 + math.cos(math.pi * e / epochs)))
    garden.attach(optimizer, plan)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        train_epoch(garden.model, optimizer, data.train, 128, order)
        plan.step()
        garden.step(lambda: held_out_losses(garden.model, data.validation))
    return garden.harvest()


def main(data, device, seeds, before, more, budget, data_root):
    data = (load_digits() if data == "digits" else load_fashion_mnist(data_root)).to(device)
    _, channels, size, _ = data.train.images.shape
    gains = {"sham": [], "never": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        host = build_cnn_host(blocks=2 if size < 16 else 3, in_channels=channels, image_size=size).to(device)
        wrap = {"slots": "sites.*", "example": data.train.images[:4], "budget": budget}
        trained = train(esper.grow(host, **wrap, policy="never"), data, before, seed)
        row, events = {"seed": seed, "trained": score(trained, data.test)[0]}, []
        for arm in ("heuristic", "sham", "never"):
            policy, blueprints = (replay(events), ["sham"]) if arm == "sham" else (arm, None)
            own = {"settings": esper.GrowthSettings(seed=seed, epochs=more, scale_at_birth=1.0), "policy": policy}
            garden = esper.grow(copy.deepcopy(trained), **wrap, **own, blueprints=blueprints)
            plain = train(garden, data, more, 1000 + seed)
            events = events or garden.history
            row |= {arm: score(plain, data.test)[0], f"{arm}_parameters": sum(p.numel() for p in plain.parameters())}
            if arm in gains:
                gains[arm].append(row["heuristic"] - row[arm])
        print(json.dumps(row), flush=True)
    for arm, gained in gains.items():
        error = statistics.stdev(gained) / math.sqrt(seeds)
        print(f"grown minus {arm}: {statistics.fmean(gained):+.2%} ± {error:.2%} over {seeds} seeds")


if __name__ == "__main__":
    parser, root = argparse.ArgumentParser(description=__doc__), {"data-root": Path(".")}
    defaults = {"data": "digits", "device": "cpu", "seeds": 2, "before": 20, "more": 10, "budget": 3.0, **root}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
