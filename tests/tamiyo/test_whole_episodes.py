"""Policies in real training:

whole episodes on three kinds of host, harm left to probation, sham without effect.
"""

import copy

import pytest
import torch
from torch import nn

from esper.garden.garden import Garden
from esper.kasmina.hosts import build_cnn_host, build_mlp_host, build_transformer_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.tamiyo.policies import RulePolicy
from esper.tamiyo.rules import Heuristic, Sham
from esper.tamiyo.scripts import script_of
from esper.telemetry.events import ActionTaken, SeedMeasured, StageChanged

STAGES = ["GERMINATED", "BLENDING", "PROBATIONARY", "FOSSILIZED", "DORMANT"]


def draw(seed):
    return torch.Generator().manual_seed(seed)


def images(seed):
    inputs = torch.randn(128, 1, 8, 8, generator=draw(seed))
    return inputs, (
        inputs[:, 0, :4].square().mean((1, 2)) > inputs[:, 0, 4:].square().mean((1, 2))
    ).long()


def vectors(seed):
    inputs = torch.randn(384, 6, generator=draw(seed))
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def tokens(seed):
    """The next token is the sum of the last two: two steps of thought for a small model."""
    first = torch.randint(5, (48, 12), generator=draw(seed))
    for position in range(2, 12):
        first[:, position] = (first[:, position - 1] + first[:, position - 2]) % 5
    return first[:, :-1], first[:, 1:]


HOSTS = {
    "cnn": (
        lambda: build_cnn_host(blocks=2, base_channels=4, in_channels=1, image_size=8, classes=2),
        images,
    ),
    "mlp": (lambda: build_mlp_host(inputs=6, widths=(6, 6), classes=2), vectors),
    "transformer": (
        lambda: build_transformer_host(
            vocabulary=5, width=8, layers=2, heads=2, context=12, slots=2
        ),
        tokens,
    ),
}
every_host = pytest.mark.parametrize(("host", "data"), HOSTS.values(), ids=HOSTS.keys())


def losses(model, batch):
    inputs, labels = batch
    scores = model(inputs)
    if scores.dim() == 3:
        return nn.functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(1)
    return nn.functional.cross_entropy(scores, labels, reduction="none")


def grow(host, data, policy, epochs, lengths=None, **options):
    """Train a host with AdamW under a policy and measure it on other data."""
    settings = GrowthSettings(scale_at_birth=1.0, lengths=lengths or StageLengths())
    garden = Garden(MorphogeneticModel(host, settings=settings, **options), policy)
    optimizer = torch.optim.AdamW(garden.parameters(), lr=1e-2)
    garden.attach(optimizer)
    train, held_out = data(1), data(2)
    for epoch in range(epochs):
        garden.model.train()
        for rows in torch.randperm(len(train[0]), generator=draw(epoch)).split(16):
            optimizer.zero_grad()
            losses(garden.model, (train[0][rows], train[1][rows])).mean().backward()
            optimizer.step()
        garden.step(lambda: losses(garden.model, held_out))
    return garden


def stages(garden, slot):
    return [
        event.after
        for event in garden.history
        if isinstance(event, StageChanged) and event.slot == slot
    ]


@every_host
def test_the_heuristic_leads_seeds_through_all_stages(host, data):
    garden = grow(host(), data, "heuristic", 16, budget=20_000)
    paths = ["-".join(stages(garden, slot)) for slot in garden.model.slot_config.slot_ids]
    assert any("-".join(STAGES) in path for path in paths)
    assert garden.model.fossilized_seeds == "-".join(paths).count("FOSSILIZED")


@every_host
def test_every_action_of_the_heuristic_is_carried_out(host, data):
    garden = grow(host(), data, "heuristic", 8)
    assert not [event for event in garden.history if type(event).__name__ == "ActionRefused"]
    assert [event for event in garden.history if isinstance(event, ActionTaken)]


def test_a_seed_that_does_harm_is_kept_all_the_same():
    """A seed that an adversary scrambles every epoch."""
    host, data = HOSTS["mlp"]
    garden = grow(host(), data, "heuristic", 1, blueprints=["mlp"], max_seeds=1)
    held_out = data(2)
    for _ in range(3):
        for slot in garden.model.slots.values():
            if slot.seed is not None:
                nn.init.normal_(slot.seed.scale, std=30.0, generator=draw(1))
        garden.step(lambda: losses(garden.model, held_out))
    measured = [event for event in garden.history if isinstance(event, SeedMeasured)]
    assert [event.stage for event in measured] == ["BLENDING", "PROBATIONARY"]
    assert measured[0].contribution is None
    assert measured[1].contribution < -measured[1].standard_error
    planted, kept = [event for event in garden.history if isinstance(event, ActionTaken)]
    assert (planted.op, kept.op) == ("GERMINATE", "FOSSILIZE")
    assert stages(garden, planted.slot) == [
        "GERMINATED",
        "BLENDING",
        "PROBATIONARY",
        "FOSSILIZED",
        "DORMANT",
    ]


@pytest.mark.parametrize("ramp", [1, 3])
@every_host
def test_sham_growth_ends_where_the_host_alone_ends_to_the_bit(host, data, ramp):
    bare = host()
    lengths = StageLengths(ramp=ramp)
    names = ["norm", "sham"] if data is images else ["lora", "sham"]
    grown = grow(
        copy.deepcopy(bare),
        data,
        lambda g: RulePolicy(Heuristic(g)),
        10,
        lengths,
        blueprints=names,
        max_seeds=2,
    )
    never = grow(copy.deepcopy(bare), data, "never", 10, lengths, blueprints=names)

    def replay(facts):
        return RulePolicy(Sham(facts, script_of(grown.history, facts.space)))

    sham = grow(copy.deepcopy(bare), data, replay, 10, lengths, blueprints=names, max_seeds=2)
    planted = [
        event.blueprint
        for event in sham.history
        if isinstance(event, ActionTaken) and event.op == "GERMINATE"
    ]
    assert planted
    assert set(planted) == {"sham"}
    assert sham.model.total_params == sham.model.host_params
    expected, found = never.model.host.state_dict(), sham.model.host.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
