"""A small GPT of today's build, and runs of it whose depth follows a schedule."""

import torch
from torch import nn
from torch.nn import functional

import esper

PLAN = {3: 0.3, 4: 0.6}
STEPS, ROWS, LENGTH = 20, 4, 8
TOTAL = STEPS * ROWS * LENGTH


class Block(nn.Module):
    """Attention and squared ReLU, with a norm that has weights."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, features):
        query, key, value = self.enter(self.norm(features)).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        features = features + self.leave(seen)
        return features + self.down(torch.relu(self.up(self.norm(features))).square())


class GPT(nn.Module):
    def __init__(self, layers=2, width=8, block=Block):
        super().__init__()
        self.token = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(layers))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        features = self.token(tokens)
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def build(layers=2, seed=0, **options):
    torch.manual_seed(seed)
    return GPT(layers, **options)


def split(model):
    """Muon for matrices of the blocks, AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if "blocks." in name and p.dim() == 2]
    rest = [p for name, p in named if "blocks." not in name or p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=3e-3)]


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)]


def schedule(model, optimizers, **options):
    settings = {"layers": "blocks", "to": 4, "total": TOTAL, "plan": PLAN} | options
    return esper.DepthSchedule(model, optimizers, **settings)


def batch(number):
    numbers = torch.Generator().manual_seed(number)
    return torch.randint(0, 11, (ROWS, LENGTH + 1), generator=numbers)


def loss_of(call, tokens):
    logits = call(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model, optimizers, depth=None, steps=range(STEPS), share=slice(None), loss=loss_of):
    """Losses of steps; the schedule counts all rows, also those of other processes."""
    losses = []
    for number in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss(model, batch(number)[share])
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(value.detach()))
        if depth is not None:
            depth.step(tokens=ROWS * LENGTH)
    return losses


def values_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def are_equal(first, second):
    one, other = values_of(first), values_of(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
