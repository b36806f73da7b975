"""A trained model gets K more epochs: grown, sham-grown, or kept training, all at one learning-rate plan."""

import argparse
import copy
import json
import math
from pathlib import Path

import torch

import esper
from esper.kasmina import build_cnn_host
from esper.runtime.data import load_digits, load_fashion_mnist
from esper.runtime.training import held_out_losses, score, train_epoch
from esper.tamiyo import replay


def train(garden, data, epochs, seed):
    optimizer = torch.optim.SGD(garden.parameters(), 0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: min(1.0, 1 + math.cos(math.pi * e / epochs)))
    garden.attach(optimizer, plan)  # constant for half of the epochs, then down along a cosine
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        train_epoch(garden.model, optimizer, data.train, 128, order)
        plan.step()
        garden.step(lambda: held_out_losses(garden.model, data.validation))
    return garden.harvest()


def main(fashion_mnist, device, first_seed, seeds, before, more, budget):
    data = (load_fashion_mnist(Path(fashion_mnist)) if fashion_mnist else load_digits()).to(device)
    (_, channels, size, _), test, rows = data.train.inputs.shape, data.test.open_for_final_report(), []
    for seed in range(first_seed, first_seed + seeds):
        torch.manual_seed(seed)
        host = build_cnn_host(blocks=2 if size < 16 else 3, in_channels=channels, image_size=size).to(device)
        wrap = {"slots": "sites.*", "example": data.train.example(), "budget": budget}
        trained, events = train(esper.grow(host, **wrap, policy="never"), data, before, seed), []
        row = {"seed": seed, "trained": score(trained, test)[0]}
        for arm in ("heuristic", "sham", "never"):
            policy, blueprints = (replay(events), ["sham"]) if arm == "sham" else (arm, None)
            wrap |= {"settings": esper.GrowthSettings(seed=seed, epochs=more, scale_at_birth=1.0)}
            garden = esper.grow(copy.deepcopy(trained), **wrap, policy=policy, blueprints=blueprints)
            plain = train(garden, data, more, 1000 + seed)
            events = events or garden.history
            row |= {arm: score(plain, test)[0], f"{arm}_parameters": sum(p.numel() for p in plain.parameters())}
        rows.append(row)
        print(json.dumps(row), flush=True)
    for arm in ("sham", "never"):
        gained = torch.tensor([row["heuristic"] - row[arm] for row in rows])
        print(f"grown minus {arm}: {gained.mean():+.2%} ± {gained.std() / len(rows) ** 0.5:.2%} over {len(rows)} seeds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)  # --fashion-mnist takes the folder of the official files
    defaults = {"fashion-mnist": "", "device": "cpu", "first-seed": 0, "seeds": 2}
    defaults |= {"before": 20, "more": 10, "budget": 3.0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
