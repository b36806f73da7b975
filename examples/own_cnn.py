"""Grow your own CNN in your own training loop (scikit-learn's digits; a few seconds on a CPU)."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import esper


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.layer2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, images):
        return self.head(self.layer2(self.layer1(images)).mean((2, 3)))


def main(epochs: int) -> None:
    pixels, target = load_digits(return_X_y=True)
    images, labels = (
        torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
        torch.tensor(target),
    )
    train, held_out = slice(300, None), slice(0, 300)
    torch.manual_seed(0)

    settings = esper.GrowthSettings(
        epochs=epochs
    )  # knowing the length, the policy plants nothing too late
    garden = esper.grow(
        SmallNet(), slots=["layer*"], example=images[:8], budget=3.0, settings=settings
    )
    optimizer = torch.optim.AdamW(garden.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    garden.attach(optimizer, scheduler)

    def evaluate():
        return nn.functional.cross_entropy(
            garden.model(images[held_out]), labels[held_out], reduction="none"
        )

    for _ in range(epochs):
        garden.model.train()
        for rows in torch.randperm(len(labels) - 300).split(64):
            loss = nn.functional.cross_entropy(
                garden.model(images[train][rows]), labels[train][rows]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        for event in garden.step(evaluate):
            print(event)

    print(garden.report())  # with everything, without each part, without all
    plain = garden.harvest().eval()
    right = (plain(images[held_out]).argmax(1) == labels[held_out]).float().mean()
    size = sum(p.numel() for p in plain.parameters())
    print(f"{type(plain).__name__} with {size:,} parameters: {right:.1%} held out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
