"""Small growing networks for the tests of this folder, and how to train them a little."""

import copy

import torch
from torch import nn

from esper.kasmina.hosts import ChainHost, build_cnn_host, build_mlp_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings

CLASSES = 3


def cnn_host():
    return build_cnn_host(blocks=2, base_channels=4, in_channels=1, image_size=8, classes=CLASSES)


def mlp_host():
    return build_mlp_host(inputs=6, widths=(8, 8), classes=CLASSES)


def noisy_host():
    """Batch norm and dropout: what a careless shadow pass would disturb."""
    blocks = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Dropout(0.3),
        )
        for before, after in ((1, 4), (4, 8))
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    return ChainHost(blocks, head, torch.zeros(2, 1, 8, 8))


def images(count=8, seed=1):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def vectors(count=8, seed=1):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def labels(count=8, seed=2):
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def loss_of(model, inputs):
    return nn.functional.cross_entropy(model(inputs), labels(len(inputs)))


def grow_cnn(host=None, *, lr=0.1, attach=True, lengths=None, scale=0.0, **options):
    """A CNN of two slots with its optimiser attached."""
    settings = GrowthSettings(lengths=lengths or StageLengths(), scale_at_birth=scale)
    model = MorphogeneticModel(host or cnn_host(), settings=settings, **options)
    if attach:
        model.attach(torch.optim.SGD(model.host.parameters(), lr=lr, momentum=0.9))
    return model


def grow_mlp(*, attach=True, lengths=None, scale=0.0, **options):
    settings = GrowthSettings(lengths=lengths or StageLengths(), scale_at_birth=scale)
    model = MorphogeneticModel(mlp_host(), settings=settings, **options)
    if attach:
        model.attach(torch.optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9))
    return model


def train(model, inputs, steps=3):
    model.train()
    for _ in range(steps):
        model.link.optimizer.zero_grad()
        loss_of(model, inputs).backward()
        model.link.optimizer.step()


def measure(model, slot_id, gain=1.0):
    """Record made-up evidence: a clear gain or, below zero, a clear harm."""
    without = torch.tensor([1.0, 2.0, 3.0]) + gain
    model.record_counterfactual(
        slot_id, with_slot=torch.tensor([1.0, 2.0, 3.1]), without_slot=without
    )


def put_on_probation(model, slot_id, blueprint, blend, inputs):
    """Germinate, train through the ramp and into probation, measured."""
    model.germinate_seed(slot_id, blueprint, blend)
    while model.slot(slot_id).state.stage.name != "PROBATIONARY":
        model.tick()
        train(model, inputs)
    measure(model, slot_id)


def keep(model, slot_id):
    """Fossilize a measured seed, and wait until its slot is open again."""
    model.fossilize_seed(slot_id)
    model.tick()
    model.tick()


@torch.no_grad()
def output(model, inputs):
    """What the network says in evaluation; the mode is as before afterwards."""
    mode = model.training
    try:
        return model.eval()(inputs)
    finally:
        model.train(mode)


def without_seed(model, slot_id):
    """A copy in which the slot holds no live seed."""
    twin = copy.deepcopy(model)
    twin.slots[slot_id].seed = None
    return twin


def snapshot(model):
    """Everything a refused call must leave as it was."""
    groups = [] if model.link is None else model.link.optimizer.param_groups
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "reports": model.get_slot_reports(),
        "groups": [[id(parameter) for parameter in group["params"]] for group in groups],
        "births": model.births,
        "random state": torch.get_rng_state(),
    }


def is_same(before, after):
    weights = before["weights"].keys() == after["weights"].keys() and all(
        torch.equal(value, after["weights"][name]) for name, value in before["weights"].items()
    )
    rest = all(before[key] == after[key] for key in ("reports", "groups", "births"))
    return weights and rest and torch.equal(before["random state"], after["random state"])
