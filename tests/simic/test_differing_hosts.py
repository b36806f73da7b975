"""A growth policy's world where hosts differ: masks, observations, twins, rewards, training."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from esper.leyline.errors import UnknownNameError
from esper.leyline.factored_actions import OP_GERMINATE
from esper.runtime.population import Population
from esper.runtime.tasks.families import Span, for_host, variation_of
from esper.runtime.tasks.registry import TASKS, register_task
from esper.simic import twins
from esper.simic.config import TrainingConfig
from esper.simic.environment import GrowthVectorEnv
from esper.simic.gymnasium_envs import GrowthEnv
from esper.simic.host_seeds import draw_host_seeds
from esper.simic.trainer import build_environment
from esper.simic.training import train_ppo
from esper.simic.twins import raise_twins
from esper.storage import runfolder
from esper.telemetry.events import ActionRefused, HostBegan
from runtime.test_differing_hosts import DEEP
from simic.growths import WAIT

SEEDS = (1, 2, 3, 4)
PLANT = (OP_GERMINATE, 0, 1, 0)


@pytest.fixture
def family():
    task = replace(DEEP, name="deep_digits", epochs=3)
    yield register_task(task)
    del TASKS[task.name]


def grow(folder, count=2, **options):
    return GrowthVectorEnv(DEEP, count, host_seeds=SEEDS, folder=folder, **options)


def play(env, action=WAIT, steps=3):
    """What the environment shows, step by step."""
    obs, info = env.reset(seed=0)
    seen = [(obs, np.zeros(env.num_envs), info)]
    for _ in range(steps):
        obs, rewards, _, _, info = env.step([action] * env.num_envs)
        seen.append((obs, rewards, info))
    return seen


def test_hosts_of_every_depth_have_the_same_shapes(tmp_path):
    env = grow(tmp_path, 4)
    assert env.space.slots.slot_ids == ("r0c0", "r0c1", "r0c2")
    obs, info = env.reset(seed=0)
    assert obs.shape == (4, env.width)
    assert info["action_mask"]["slot"].shape == (4, 4, 3)
    depths = [run.variation.depth for run in env.population.runs]
    assert set(depths) == {2, 3}
    for host, depth in enumerate(depths):
        assert info["action_mask"]["slot"][host, OP_GERMINATE].tolist() == [True, True, depth == 3]


def test_a_host_beside_others_earns_what_it_earns_alone(tmp_path):
    env = grow(tmp_path, 4)
    together = play(env, PLANT)
    for host, run in enumerate(env.population.runs):
        alone = GrowthVectorEnv(DEEP, 1, host_seeds=[run.seed], folder=tmp_path)
        if run.variation.depth == 2:
            continue  # a host of the deepest kind has the same space alone
        for (obs, rewards, _), (obs_alone, rewards_alone, _) in zip(
            together, play(alone, PLANT), strict=True
        ):
            assert (obs[host] == obs_alone[0]).all()
            assert rewards[host] == rewards_alone[0]


def test_what_a_host_has_drawn_is_the_first_event_of_its_episode(tmp_path):
    env = grow(tmp_path)
    _, info = env.reset(seed=0)
    for host, run in enumerate(env.population.runs):
        began = info["events"][host][0]
        variation = variation_of(DEEP, run.seed)
        assert began == HostBegan(
            host=host, epoch=1, seed=run.seed, variation=variation.number, drawn=variation.drawn
        )
    *_, info = env.step([WAIT, WAIT])
    assert not any(isinstance(event, HostBegan) for event in info["events"][0])


def test_every_episode_begins_with_the_host_of_its_seed(tmp_path):
    env = grow(tmp_path)
    env.reset(seed=0)
    began = []
    for _ in range(2 * DEEP.epochs):
        *_, info = env.step([WAIT, WAIT])
        began += [
            event for events in info["events"] for event in events if type(event) is HostBegan
        ]
    assert len(began) == 4
    assert all(event.variation == variation_of(DEEP, event.seed).number for event in began)
    assert env.population.runs[0].variation == variation_of(DEEP, env.population.runs[0].seed)


def test_a_slot_that_a_host_lacks_is_refused_and_counts_as_waiting(tmp_path):
    env = grow(tmp_path, 4)
    env.reset(seed=0)
    *_, info = env.step([(OP_GERMINATE, 2, 1, 0)] * 4)
    for host, run in enumerate(env.population.runs):
        first = info["events"][host][0]
        assert isinstance(first, ActionRefused) == (run.variation.depth == 2)


# -- twins -----------------------------------------------------------------------------------------


def test_a_twin_is_the_host_of_its_seed_never_grown(tmp_path):
    raised = raise_twins(DEEP, SEEDS, tmp_path)
    for seed in SEEDS:
        alone = Population(DEEP, [seed])
        alone.runs[0].is_static = True
        for epoch in range(DEEP.epochs):
            alone.train_epoch()
            alone.evaluate()
            assert raised[seed].readings[epoch] == alone.readings()[0]
        assert raised[seed].ledger.counts() == alone.runs[0].ledger.counts()


def test_twins_that_were_raised_are_read_back(tmp_path, monkeypatch):
    first = raise_twins(DEEP, SEEDS, tmp_path)
    monkeypatch.setattr(twins, "_play", lambda *_: pytest.fail("played again"))
    again = raise_twins(DEEP, SEEDS, tmp_path)
    assert [twin.readings for twin in again.values()] == [twin.readings for twin in first.values()]


def test_what_a_host_draws_is_in_its_twins_key():
    pool = DEEP.load(None)
    host = for_host(DEEP, 1, pool)
    known = {"splits": host.splits}
    key = twins.fingerprint(host.task, known, host.variation)
    for name in asdict(host.variation):
        other = replace(host.variation, **{name: getattr(host.variation, name) + 1})
        assert twins.fingerprint(host.task, known, other) != key
    assert key == twins.fingerprint(host.task, known, variation_of(DEEP, 1))


def test_a_twin_has_the_examples_and_the_wrong_labels_of_its_host(tmp_path, monkeypatch):
    played = []
    real = Population.start_epoch
    monkeypatch.setattr(
        Population, "start_epoch", lambda self, **_: (played.append(self), real(self))[1]
    )
    noisy = next(seed for seed in range(50) if variation_of(DEEP, seed).noise > 0.1)
    raise_twins(DEEP, [noisy], tmp_path)
    host = Population(DEEP, [noisy]).runs[0]
    twin = played[-1].runs[0]
    for name in ("train", "validation"):
        ours, theirs = getattr(host.splits, name), getattr(twin.splits, name)
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.targets, theirs.targets)


# -- training --------------------------------------------------------------------------------------


def settings(task, out, of_task=None, **changes):
    return TrainingConfig.of(
        {
            "task": {"name": task.name, **(of_task or {})},
            "hosts": 3,
            "host_pool": 4,
            "rounds": 2,
            "ppo": {"epochs": 1, "hidden_dim": 8, "head_dim": 8},
            "out": str(out),
            **changes,
        }
    )


def weights(agent):
    return {name: value.clone() for name, value in agent.network.state_dict().items()}


def test_a_policy_is_taught_on_hosts_that_differ(family, tmp_path):
    rounds = []
    agent = train_ppo(settings(family, tmp_path / "run"), watch=rounds.append)
    assert [event.decisions for event in rounds] == [6, 12]
    assert all(event.update["first_ratio_gap"]["joint"] <= 1e-6 for event in rounds)
    again = train_ppo(settings(family, tmp_path / "again"))
    first, second = weights(agent), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_rule_that_some_hosts_have_no_slot_for_is_no_teacher(family, tmp_path):
    settings = {
        "task": {"name": family.name},
        "hosts": 1,
        "imitation": {"policy": "schedule:epochs=1:places=r0c2.norm", "rounds": 1},
        "out": str(tmp_path / "run"),
    }
    with pytest.raises(UnknownNameError, match="r0c2"):
        build_environment(TrainingConfig.of(settings))
    assert not (tmp_path / "run" / runfolder.TWINS).exists()


def test_training_on_hosts_that_differ_is_continued(family, tmp_path):
    whole = train_ppo(settings(family, tmp_path / "whole"))
    train_ppo(settings(family, tmp_path / "half", rounds=1))
    halves = train_ppo(settings(family, tmp_path / "half"), resume=True)
    first, second = weights(whole), weights(halves)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_plain_environment_plays_a_family(tmp_path):
    env = GrowthEnv(DEEP, host_seeds=[1, 2], folder=tmp_path)
    env.reset(seed=0)
    seeds = set()
    for _ in range(2):
        is_over = False
        while not is_over:
            _, _, is_over, _, _ = env.step(WAIT)
        seeds.add(env.hosts.population.runs[0].seed)
        env.reset()
    assert seeds == {1, 2}


def test_a_budget_that_is_named_is_that_of_all_hosts(family):
    named = settings(family, "x", {"budget": 5.0}).task.build()
    assert (named.budget, named.varies.budget) == (5.0, None)
    assert named.varies.depth == Span(2, 3)
    assert settings(family, "x").task.build().varies == family.varies
    assert draw_host_seeds(0, 2) == draw_host_seeds(0, 3)[:2]
