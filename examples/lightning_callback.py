"""Grow a model under Lightning, in one process or several, killed and resumed as you like."""

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.integrations.lightning import GrowthCallback


class Digits(lightning.LightningModule):
    def __init__(self, garden):
        super().__init__()
        self.garden, self.net = garden, garden.model

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=5e-3)
        self.garden.attach(optimizer)
        return optimizer


def main(epochs: int, resume: str | None, folder: str = "runs/lightning") -> None:
    pixels, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(target)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    settings = esper.GrowthSettings(epochs=epochs)  # the last epoch judges what has grown
    garden = esper.grow(net, slots="1", example=images[:4], budget=2.0, settings=settings)
    ema = garden.ema(0.99)

    def evaluate():
        return nn.functional.cross_entropy(
            garden.model(images[:300]), labels[:300], reduction="none"
        )

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    growth = GrowthCallback(garden, evaluate)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, callbacks=[growth], **quiet
    )
    loader = DataLoader(TensorDataset(images[300:], labels[300:]), batch_size=64, shuffle=True)
    trainer.fit(Digits(garden), loader, ckpt_path=resume)
    with ema.applied():
        print(garden.harvest())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--resume", help="a checkpoint of Lightning's to go on from")
    main(**vars(parser.parse_args()))
