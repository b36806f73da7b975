"""Models as users write them, a problem for them to learn, and policies that follow a script."""

import numpy as np
import torch
from torch import nn

import esper
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings

CLASSES = 3
WAIT, CULL_FIRST, KEEP_FIRST, PLANT_FIRST = (0, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0), (1, 0, 1, 0)
"""op, slot, blueprint, blend"""


class CNN(nn.Module):
    """Two convolutions with batch norm; what a README would show."""

    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.motto = "small"
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images):
        return self.head(self.dropout(self.layer2(self.layer1(images)).mean((2, 3))))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.middle, self.leave = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, CLASSES),
        )

    def forward(self, vectors):
        return self.leave(torch.relu(self.middle(torch.relu(self.enter(vectors)))))


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
            for _ in range(2)
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, images):
        features = self.stem(images)
        for block in self.blocks:
            features = features + block(features)
        return self.head(features.mean((2, 3)))


class Encoder(nn.Module):
    """torch's own transformer encoder with a linear head."""

    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)
        self.tokens = 1 if batch_first else 0

    def forward(self, tokens):
        return self.head(self.encoder(tokens).mean(self.tokens))


class TiedLanguageModel(nn.Module):
    """Input and output share one matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


class Twice(nn.Module):
    """Calls one layer two times per forward."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.leave = nn.Linear(6, CLASSES)

    def forward(self, vectors):
        return self.leave(self.shared(torch.relu(self.shared(vectors))))


def sequential_net():
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def random_images(count=8, seed=1):
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def random_vectors(count=8, seed=1):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def labels_of(inputs):
    """A rule that a small network learns in part: quantiles of the inputs' energy."""
    energy = inputs.flatten(1).square().mean(1)
    return (energy > 0.85).long() + (energy > 1.1).long()


def losses_of(model, inputs):
    """Cross-entropy of every example."""
    return nn.functional.cross_entropy(model(inputs), labels_of(inputs), reduction="none")


def train_epoch(model, optimizer, epoch, inputs, batch=16):
    """One pass in an order that the epoch's number decides, dropout included."""
    torch.manual_seed(epoch)
    model.train()
    for rows in torch.randperm(len(inputs)).split(batch):
        optimizer.zero_grad()
        losses_of(model, inputs[rows]).mean().backward()
        optimizer.step()


def script(choices, keeps=True):
    """A policy of a user's own that plays `choices` and else waits.

    `choices` are {decision: (op, slot, blueprint, blend)}. If it `keeps`, it has the standing order
    of rules: what was measured is fossilized.
    """

    class Scripted:
        keeps_measured = keeps

        def decide(self, observation, masks, reports, memory, signals):
            decision = memory or 0
            return np.array([choices.get(decision, WAIT)]), decision + 1

    return lambda facts: Scripted()


def grow_cnn(
    choices=None,
    *,
    lengths=None,
    attach=True,
    lr=0.05,
    scale=0.0,
    host=None,
    keeps=True,
    epochs=None,
    **options,
):
    """A garden around the CNN with a slot on each layer, its optimiser attached."""
    options.setdefault("policy", script(choices or {}, keeps))
    options.setdefault("blueprints", ["conv_light", "norm", "conv_small"])
    options.setdefault("slots", ["layer1", "layer2"])
    garden = esper.grow(
        host or CNN(),
        example=random_images(2),
        settings=GrowthSettings(
            lengths=lengths or StageLengths(), scale_at_birth=scale, epochs=epochs
        ),
        **options,
    )
    if attach:
        garden.attach(torch.optim.SGD(garden.parameters(), lr=lr, momentum=0.9))
    return garden


def made_up(garden, helps=1.0, count=6):
    """An evaluation by fiat: every live seed in the output lowers the loss by about `helps`."""

    def evaluate():
        shares = [
            float(slot.alpha) for slot in garden.model.slots.values() if slot.seed is not None
        ]
        return torch.arange(count) * (1 - 0.01 * helps * sum(shares)) + 2.0 - helps * sum(shares)

    return evaluate


def stage_of(garden, slot_id="r0c0"):
    return garden.model.slot(slot_id).state.stage.name


def walk_to(garden, stage, slot_id="r0c0", evaluate=None):
    """Step, training nothing, until a slot is in a stage."""
    for _ in range(20):
        if stage_of(garden, slot_id) == stage:
            return garden
        garden.step(evaluate or made_up(garden))
    raise AssertionError(f"{slot_id} is {stage_of(garden, slot_id)} and never came to be {stage}")


class OneBuffer(MLP):
    """Weights that are parts of one tensor, as cuDNN has those of an LSTM."""

    def __init__(self):
        super().__init__()
        flat, place = nn.utils.parameters_to_vector(self.parameters()).detach(), 0
        for parameter in self.parameters():
            parameter.data = flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()
