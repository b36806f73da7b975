"""Rewards of several families of hosts: each is measured by itself, and none drowns the others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from esper.leyline.errors import SaveError
from esper.simic import PPOAgent
from esper.simic.ppo.families import FamilyReturns
from esper.simic.ppo.rollout import Rollout, gae
from esper.simic.trainer import build_agent, build_environment
from esper.tamiyo.policy_files import Layout, read
from simic.ppo.test_update import settings
from simic.tiny_runs import tiny
from simic.worlds import WIDTH, growth_agent, growth_rollout

GAMMA = 0.9
FAMILIES = [0, 0, 0, 1, 1]


def two_families(agent, factor=1.0, seed=0):
    """A rollout of whole episodes; rewards of the second family are `factor` times as large."""
    rollout = growth_rollout(agent, count=len(FAMILIES), seed=seed, whole=True)
    rollout.families = list(FAMILIES)
    rollout.rewards[:, 3:] *= factor
    return rollout


def family_agent(names=("small", "large"), **changes):
    agent = growth_agent(settings(gamma=GAMMA, **changes))
    agent.returns = FamilyReturns(names)
    return agent


def returns_of(rollout, rows):
    nothing = torch.zeros_like(rollout.rewards)
    found = gae(rollout.rewards, nothing, nothing, rollout.terminated, rollout.ended, GAMMA, 1.0)
    return found[:, rows].double()


def kept(values):
    return values


def test_the_scale_of_a_family_is_the_deviation_of_its_discounted_returns():
    agent = family_agent()
    rollout = two_families(agent, 100.0)
    agent.returns.update(rollout, GAMMA, kept, set())
    small, *_, large = agent.returns.scales(rollout).tolist()
    assert small == pytest.approx(returns_of(rollout, slice(3)).std(unbiased=False).item())
    assert large == pytest.approx(returns_of(rollout, slice(3, 5)).std(unbiased=False).item())
    assert large > 20 * small


def test_returns_are_discounted_sums_of_rewards():
    rollout = two_families(family_agent())
    expected = torch.zeros(5)
    for step in reversed(range(rollout.steps)):
        expected = rollout.rewards[step] + GAMMA * expected
    torch.testing.assert_close(returns_of(rollout, slice(5))[0].float(), expected)


def test_scales_move_once_with_each_update_and_after_it():
    agent = family_agent()
    first = two_families(agent)
    agent.update(first)
    after_first = agent.returns.state()
    second = two_families(agent, seed=1)
    used = []
    real = agent.returns.scales
    agent.returns.scales = lambda rollout: used.append(agent.returns.state()) or real(rollout)
    agent.update(second)
    # what a family earned is known before its first update, so that no unit changes in between
    assert used == [after_first]
    both = torch.cat([returns_of(first, slice(3)), returns_of(second, slice(3))]).flatten()
    mean, variance, count = agent.returns.state()["small"]
    assert count == both.numel() == 48
    assert mean == pytest.approx(both.mean().item())
    assert variance == pytest.approx(both.var(unbiased=False).item())


def test_advantages_are_normal_in_each_family():
    agent = family_agent()
    rollout = two_families(agent, 100.0)
    rollout.valid[5:, 0] = False
    raw, _ = rollout.targets(GAMMA, 0.95)
    advantages = agent.returns.normalise(raw, rollout, kept)
    for rows in (slice(3), slice(3, 5)):
        found = advantages[:, rows][rollout.valid[:, rows]]
        assert found.mean().item() == pytest.approx(0, abs=1e-6)
        assert found.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    assert not advantages[5:, 0].any()


def test_a_family_with_rewards_a_hundred_times_as_large_does_not_drown_the_other():
    agents = {factor: family_agent(max_grad_norm=1e9) for factor in (1.0, 100.0)}
    for factor, agent in agents.items():
        for seed in range(2):
            agent.update(two_families(agent, factor, seed))
    alike, hundred = (dict(agent.network.named_parameters()) for agent in agents.values())
    for name, value in alike.items():
        torch.testing.assert_close(hundred[name], value, rtol=1e-3, atol=1e-4, msg=name)
    # without families it is another update altogether
    drowned = {factor: family_agent((), max_grad_norm=1e9) for factor in (1.0, 100.0)}
    for factor, agent in drowned.items():
        agent.update(two_families(agent, factor))
    one, other = (agent.network.encoder.weight for agent in drowned.values())
    assert (one - other).abs().max() > 1e-3


def test_without_names_rewards_stay_as_they_are():
    agent = family_agent(())
    rollout = two_families(agent)
    assert agent.returns.scales(rollout) is None
    assert agent.returns.begin(rollout, GAMMA, kept) == set()
    assert agent.returns.state() == {}


def test_a_family_that_earns_nothing_or_has_no_row_is_divided_by_one():
    agent = family_agent(("small", "large", "absent"))
    rollout = two_families(agent, 0.0)
    agent.update(rollout)
    assert agent.returns.scales(rollout).tolist()[3:] == [1.0, 1.0]
    assert agent.returns.state()["absent"] == (0.0, 1.0, 0.0)


def test_what_is_not_a_number_is_not_taken_in():
    agent = family_agent()
    rollout = two_families(agent)
    rollout.rewards[3, 0] = torch.nan
    agent.returns.update(rollout, GAMMA, kept, set())
    assert agent.returns.state()["small"][2] == 3 * 8 - 4


def meeting(count):
    """A pool for each of some threads, which adds up what all of them have."""
    barrier, board = threading.Barrier(count), [None] * count

    def pool(rank, value):
        board[rank] = value
        barrier.wait()
        total = sum(board)
        barrier.wait()
        return total

    return [partial(pool, rank) for rank in range(count)]


def test_ranks_agree_on_one_number():
    agent = family_agent()
    rollout = two_families(agent)
    agent.returns.update(rollout, GAMMA, kept, set())
    ranks = []
    for rows, pool in zip((slice(0, 2), slice(2, 5)), meeting(2), strict=True):
        families = FAMILIES[rows]
        part = Rollout(8, len(families), WIDTH, agent.network.spec, {}, families=families)
        for name in ("rewards", "terminated", "truncated", "valid"):
            getattr(part, name)[:] = getattr(rollout, name)[:, rows]
        ranks.append((FamilyReturns(agent.returns.names), part, pool))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: rank[0].update(rank[1], GAMMA, rank[2], set()), ranks))
    assert ranks[0][0].state() == ranks[1][0].state()
    for name, saved in agent.returns.state().items():
        assert ranks[0][0].state()[name] == pytest.approx(saved)


def test_a_file_brings_back_every_bit_and_another_suite_is_refused(tmp_path):
    config = tiny(tmp_path / "run")
    agent, _ = build_agent(config, build_environment(config))
    assert agent.returns.names == ("blobs",)
    agent.returns.stats[0].update(torch.randn(7, 1))
    agent.save(tmp_path / "one.safetensors")
    again = PPOAgent.load(tmp_path / "one.safetensors")
    assert again.returns.state() == agent.returns.state()
    agent.returns = FamilyReturns(("digits", "blobs"))
    with pytest.raises(SaveError, match="it learned on blobs, not on digits, blobs"):
        agent.restore(read(tmp_path / "one.safetensors", Layout), tmp_path / "one.safetensors")
