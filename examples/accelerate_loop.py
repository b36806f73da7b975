"""Grow with accelerate, in one process or several (accelerate launch), killed and resumed as you
like.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.integrations.accelerate import join


def main(epochs: int, folder: Path) -> None:
    torch.manual_seed(0)
    x = torch.rand(2400, 2) * 2 - 1
    y = (x.prod(1) > 0).long()
    accelerator = Accelerator(cpu=True)
    garden = esper.grow(
        nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)),
        slots=["0"],
        example=x[:8],
        budget=20.0,
        settings=esper.GrowthSettings(epochs=epochs),  # the last epoch judges what has grown
    )
    ema = garden.ema(0.99)
    optimizer = torch.optim.AdamW(garden.parameters(), lr=1e-2)
    garden.attach(optimizer)
    loader = DataLoader(TensorDataset(x[:2000], y[:2000]), batch_size=80, shuffle=True)
    model, optimizer, loader = accelerator.prepare(garden.model, optimizer, loader)
    join(accelerator, garden)  # from now on save_state and load_state know of the garden

    def evaluate():
        return nn.functional.cross_entropy(garden.model(x[2000:]), y[2000:], reduction="none")

    if saved := sorted(folder.glob("*"), key=lambda path: int(path.name)):
        accelerator.load_state(str(saved[-1]))
    for _ in range(garden.epoch, epochs):
        model.train()
        losses = []
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        for event in garden.step(evaluate, train_loss=torch.stack(losses).mean()):
            accelerator.print(event)
        accelerator.save_state(str(folder / str(garden.epoch)))
    with ema.applied():
        accelerator.print(garden.harvest())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    main(**vars(parser.parse_args()))
