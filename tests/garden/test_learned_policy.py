"""A learned policy in a loop of one's own: it reads what it reads in an episode, and decides alike."""

import numpy as np
import pytest
import torch

import esper
from esper.episodes import Episodes
from esper.garden.measuring import track
from esper.kasmina.optimiser import OptimizerLink
from esper.leyline.errors import SettingError
from esper.runtime.population import Population
from esper.tamiyo.actor_critic import ActorCritic
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.policies import NetworkPolicy
from esper.tamiyo.readings import Sight, layout_for, read_host, without
from esper.telemetry.events import ActionTaken, HostEpoch
from runtime.episodes import BLOBS
from tamiyo.policy_cases import sharpen
from user_models import CNN, grow_cnn, losses_of, random_images, train_epoch

IMAGES, HELD_OUT = random_images(32), random_images(16, seed=2)
TAUGHT = ObservationLayout(5, 4)
"""Slots and blueprints that no garden here has."""


def network(seed=1):
    torch.manual_seed(seed)
    net = FactoredRecurrentActorCritic(
        TAUGHT.width, TAUGHT.num_slots, hidden_dim=16, head_dim=8, layout=TAUGHT
    )
    return sharpen(net, 100)


def learned(facts):
    return NetworkPolicy(network(), deterministic=False, seed=3)


def play(garden, epochs):
    for epoch in epochs:
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT), train_loss=0.5)
    return garden


def ops_of(garden):
    return [
        (event.epoch, event.op, event.slot, event.blueprint, event.blend)
        for event in garden.history
        if isinstance(event, ActionTaken)
    ]


def test_a_policy_taught_on_other_slots_grows_a_model_of_ones_own(monkeypatch):
    seen = []
    real = ActorCritic.get_action
    monkeypatch.setattr(
        ActorCritic,
        "get_action",
        lambda self, states, *rest, **more: (
            seen.append(states) or real(self, states, *rest, **more)
        ),
    )
    garden = play(grow_cnn(policy=learned), range(6))
    layout = layout_for(garden.model.view())
    assert layout.num_slots != TAUGHT.num_slots
    assert [tuple(states.shape) for states in seen] == [(1, layout.width)] * 6
    assert ops_of(garden)
    told = dict(zip(layout.names, seen[-1][0].tolist(), strict=True))
    assert told["host.guessing_known"] == 0
    assert told["host.has_share_left"] == 0
    assert told["host.has_gap"] == told["host.has_standing_1_ago"] == 1
    assert told["host.rate"] == 1.0
    cost = garden.ledger.phases["policy"]
    assert cost.flops == 6 * garden.policy.network.decision_flops > 0


def test_what_is_read_of_an_episode_is_read_of_a_garden_with_the_same_readings():
    episodes = Episodes(Population(BLOBS, [1]))
    model = episodes.population.runs[0].model
    history = []
    for choice in ((1, 0, 2, 0), (0, 0, 0, 0), (0, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0)):
        history += episodes.train()[0]
        episodes.act(0, choice)
        episodes.tick()
    history += episodes.train()[0]
    view = episodes.views[0]
    link = OptimizerLink.__new__(OptimizerLink)
    link.__dict__["peak_rate"] = BLOBS.lr
    rate = episodes.trackers[0].tracked.last.lr_share * BLOBS.lr
    epochs = [event for event in history if isinstance(event, HostEpoch)]
    assert len(epochs) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerLink, "rate", property(lambda self: rate), raising=False)
        tracked = track(history, BLOBS.epochs, link, view)
    in_garden = read_host(Sight(tracked, view, episodes.facts[0]), layout_for(view))
    seen = without(episodes.sight(0), {"guessing", "score"})
    assert np.array_equal(in_garden, read_host(seen, layout_for(view)))
    assert model.active_seeds + model.fossilized_seeds <= 1


def test_a_saved_garden_continues_with_what_the_network_remembered(tmp_path):
    garden = play(grow_cnn(policy=mild), range(3))
    garden.save(tmp_path)
    before = garden.memory
    play(garden, range(3, 7))
    other = grow_cnn(policy=mild)
    other.restore(tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(other.memory, before, strict=True))
    assert any(part.any() for part in before)
    play(other, range(3, 7))
    assert ops_of(other) == ops_of(garden) != []
    assert torch.equal(other.memory[0], garden.memory[0])
    loaded = esper.load(tmp_path, CNN(), policy=mild)
    assert torch.equal(loaded.memory[1], before[1])


def mild(facts):
    """The likeliest choices, which need no draws."""
    return NetworkPolicy(network(seed=5))


def test_a_memory_of_another_network_is_refused():
    garden = play(grow_cnn(policy=mild), range(1))
    garden.memory = tuple(part[..., :-1] for part in garden.memory)
    with pytest.raises(SettingError, match="the memory has shapes"):
        play(garden, range(1, 2))
