"""Give a trained model K more epochs:

grow it, sham-grow it, or just train it, all on the same rate schedule.
"""

import copy
import json
import math
from pathlib import Path

import torch
import typer

import esper
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import cross_entropy_scores
from esper.tamiyo.rules import replay


def measure(model, split, rows=...):  # the loss of each example, and whether its answer is right
    inputs, labels = split.gather(rows)
    return cross_entropy_scores(model(inputs), labels)


def train(garden, data, epochs, seed):
    optimizer = torch.optim.SGD(
        garden.parameters(), 0.2, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda e: min(1.0, 1 + math.cos(math.pi * e / epochs))
    )
    garden.attach(optimizer, plan)  # constant for half of the epochs, then down along a cosine
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train), generator=order).split(128):
            optimizer.zero_grad()
            measure(garden.model.train(), data.train, rows)[0].mean().backward()
            optimizer.step()
        plan.step()
        garden.step(torch.no_grad()(lambda: measure(garden.model, data.validation)[0]))
    plain = garden.harvest().eval()
    return plain, float(
        torch.no_grad()(measure)(plain, data.test.open_for_final_report())[1].mean()
    )


def main(
    fashion_mnist="",
    device="cpu",
    first_seed: int = 0,
    seeds: int = 2,
    before: int = 20,
    more: int = 10,
):
    task = get_task(
        "fashion_mnist" if fashion_mnist else "digits"
    )  # --fashion-mnist takes the folder of the files
    data, rows = task.load(Path(fashion_mnist)).to(device), []
    for seed in range(first_seed, first_seed + seeds):
        torch.manual_seed(seed)
        wrap, row = (
            {"slots": "sites.*", "example": data.train.example(), "budget": 3.0},
            {"seed": seed},
        )
        garden = esper.grow(task.build_host().to(device), **wrap, policy="never")
        trained, row["trained"] = train(garden, data, before, seed)
        wrap["settings"] = esper.GrowthSettings(seed=seed, epochs=more, scale_at_birth=1.0)
        for arm in ("heuristic", "sham", "never"):  # sham replays what the heuristic did
            policy, blueprints = (
                (replay(garden.history), ["sham"]) if arm == "sham" else (arm, None)
            )
            garden = esper.grow(
                copy.deepcopy(trained), **wrap, policy=policy, blueprints=blueprints
            )
            plain, row[arm] = train(garden, data, more, 1000 + seed)
            row[f"{arm}_parameters"] = sum(parameter.numel() for parameter in plain.parameters())
        rows.append(row)
        print(json.dumps(row), flush=True)
    for arm in ("sham", "never"):
        gained = torch.tensor([row["heuristic"] - row[arm] for row in rows])
        print(
            f"grown minus {arm}: {gained.mean():+.2%} ± "
            f"{gained.std() / len(rows) ** 0.5:.2%} over {len(rows)} seeds"
        )


if __name__ == "__main__":
    typer.run(main)
