"""Learning sees what acting saw:

the same numbers, masks, memory and rows, before any step has been taken.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch

from esper.simic.ppo.any_env import Player
from esper.simic.ppo.diagnostics import AnomalyDetector
from esper.simic.ppo.rollout import Rollout
from esper.tamiyo.heads import HeadSpec
from simic.worlds import (
    NEXT_STEP,
    SAME_STEP,
    SMALL,
    OneArray,
    agent_for,
    bytes_of,
    clocks,
    counting_player,
    growth_agent,
    growth_rollout,
    player_for,
)

MODES = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=["next_step", "same_step"])
ALL_AT_ONCE = SMALL.model_copy(update={"minibatches": 1})
BOUND = 1e-6
PAIR = gym.spaces.MultiDiscrete([3, 4])


# -- the first ratio -------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_before_any_step_every_ratio_is_one(mode, masked, ends):
    player = player_for(
        clocks(3, mode, [5, 7, None], ends=ends, masked=masked, actions=PAIR), ALL_AT_ONCE
    )
    player.play(9)  # the second rollout goes on with episodes and memory of the first
    assert player.hidden[0].any()
    rollout = player.play(23)
    assert rollout.starts[1:].any()
    gaps = player.agent.update(rollout).first_ratio_gap
    assert list(gaps) == ["action_0", "action_1", "joint"]
    assert max(gaps.values()) <= BOUND


@pytest.mark.parametrize("seed", range(5))
def test_before_any_step_every_ratio_of_chained_heads_is_one(seed):
    agent = growth_agent(ALL_AT_ONCE, seed)
    gaps = agent.update(growth_rollout(agent, steps=12, count=6, seed=seed)).first_ratio_gap
    assert list(gaps) == ["op", "slot", "blueprint", "blend", "joint"]
    assert max(gaps.values()) <= BOUND


def test_forgetting_the_stored_masks_shows_in_the_first_ratio():
    player = player_for(clocks(3, masked=True, episodes=[5, 7, None]), ALL_AT_ONCE)
    rollout = player.play(16)
    rollout.masks = {}
    assert player.agent.update(rollout).first_ratio_gap["joint"] > 0.1


@pytest.mark.parametrize("head", range(4))
def test_a_stored_probability_that_is_a_hundredth_off_is_an_anomaly_that_names_it(head):
    agent = growth_agent(ALL_AT_ONCE)
    rollout = growth_rollout(agent)
    used = (rollout.choices[:, 2, 0] == 1).nonzero()[0, 0]  # germinating uses all heads
    rollout.log_probs[used, 2, head] += 0.01
    record = agent.update(rollout)
    names = agent.network.spec.names
    wrong = [name for name in names if record.first_ratio_gap[name] > BOUND]
    assert wrong == [names[head]]
    assert record.first_ratio_gap["joint"] == pytest.approx(1 - np.exp(-0.01), rel=1e-3)
    (anomaly,) = [
        found for found in AnomalyDetector().check(record, 0.0) if found.kind == "first ratio gap"
    ]
    assert anomaly.where.startswith(f"host 2, epoch {used + 1}, head {names[head]}:")


def test_a_fresh_agent_raises_no_anomaly():
    agent = growth_agent()
    assert AnomalyDetector().check(agent.update(growth_rollout(agent)), 0.0) == []


def test_acting_in_half_precision_would_show_in_the_first_ratio():
    """Everything is computed and stored in float32, and the gap is below 1e-6. Acting under
    bfloat16 autocast and learning in float32 gives 0.017 here (largest of four heads and joint, 72
    decisions); the detector allows 0.001."""
    agent = growth_agent(ALL_AT_ONCE)
    with torch.autocast("cpu", torch.bfloat16):
        rollout = growth_rollout(agent, steps=12, count=6)
    assert rollout.log_probs.dtype == rollout.values.dtype == torch.float32
    assert 0.005 < max(agent.update(rollout).first_ratio_gap.values()) < 0.05


def test_log_probabilities_are_float32_even_under_autocast():
    agent = growth_agent()
    rows = growth_rollout(agent).rows(torch.arange(4))
    with torch.autocast("cpu", torch.bfloat16):
        said = agent.network.evaluate_actions(
            rows.states, rows.choices, rows.masks, rows.hidden, rows.starts
        )
    assert {tensor.dtype for tensor in (*said.log_probs.values(), said.values)} == {torch.float32}


# -- what is stored --------------------------------------------------------------------------------


def test_stored_masks_and_observations_are_those_that_were_used_though_the_environment_reuses_its_arrays():
    env = OneArray()
    rollout = player_for(env).play(9)
    env.observations[:], env.masks[:] = -1, False
    for step, (observations, masks) in enumerate(env.shown[:9]):
        real = rollout.valid[step].numpy()
        assert np.array_equal(rollout.states[step].numpy()[real], observations[real])
        assert np.array_equal(rollout.masks["action_0"][step].numpy()[real], masks[real])


def test_the_environments_arrays_are_only_read():
    env = OneArray()
    player_for(env).play(12)
    env.check_untouched()  # as it does itself before every step


def test_a_decision_is_stored_by_value():
    agent = growth_agent()
    rollout = growth_rollout(agent, steps=1)
    hidden = tuple(torch.ones(1, 4, 16) for _ in range(2))
    rollout.begin(hidden)
    masks = {name: mask[0].clone() for name, mask in rollout.masks.items()}
    seen = [
        torch.ones(4, 5),
        dict.fromkeys(agent.network.spec.names, torch.zeros(4)),
        torch.ones(4),
    ]
    flags = torch.ones(4, dtype=torch.bool)
    before = {name: mask.clone() for name, mask in masks.items()}
    rollout.add_decision(seen[0], masks, seen[1], seen[1], seen[2], flags, flags)
    for array in (*masks.values(), flags, seen[0], seen[2], *hidden):
        array.zero_()
    assert all(torch.equal(rollout.masks[name][0], mask) for name, mask in before.items())
    assert rollout.states[0].eq(1).all()
    assert rollout.values[0].eq(1).all()
    assert rollout.valid[0].all()
    assert rollout.hidden[0].eq(1).all()


@MODES
def test_the_state_of_a_row_is_the_one_before_its_first_step(mode):
    player = counting_player(clocks(2, mode))
    for played in (0, 4, 8):
        rollout = player.play(4)
        assert rollout.hidden[0].flatten().tolist() == [played] * 2
        assert rollout.end_hidden[0].flatten().tolist() == [played + 4] * 2


@MODES
def test_memory_is_as_old_as_the_episode_and_zero_where_one_begins(mode):
    player = counting_player(clocks(3, mode, [4, 6, None]))
    for _ in range(3):
        rollout = player.play(11)
        times = rollout.states[..., 1]
        assert torch.equal(
            torch.where(rollout.valid, rollout.values, 0), torch.where(rollout.valid, times, 0)
        )
        assert torch.equal(rollout.starts & rollout.valid, (times == 0) & rollout.valid)
        assert player.hidden[0][0, player.begins].eq(0).all()


@MODES
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_looking_ahead_does_not_advance_the_memory(mode, ends):
    player = player_for(clocks(3, mode, [4, 6, None], ends=ends))
    rollout = player.play(13)
    rows = rollout.rows(torch.arange(3))
    after = player.agent.network.follow(rows.states, rows.hidden, rows.starts)
    goes_on = rollout.valid[-1] & ~rollout.ended[-1]
    assert goes_on.sum() >= 2
    for kept, ended, lived in zip(player.hidden, rollout.end_hidden, after, strict=True):
        torch.testing.assert_close(kept[:, goes_on], lived[:, goes_on])
        assert torch.equal(kept, ended)


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_is_one_environment_with_consecutive_steps():
    rollout = player_for(clocks(5)).play(7)
    index = torch.tensor([3, 0, 4])
    rows = rollout.rows(index)
    assert torch.equal(rows.states[..., 0], index[:, None].expand(3, 7).float())
    assert torch.equal(rows.states[..., 1], torch.arange(7.0).expand(3, 7))


def test_everything_in_a_row_belongs_to_its_environment_and_step():
    spec = HeadSpec.independent([100, 100])
    rollout = Rollout(4, 3, 1, spec, {"action_0": (100,), "action_1": (100,)})
    rollout.begin((torch.arange(3.0).view(1, 3, 1), torch.arange(3.0).view(1, 3, 1)))
    mark = torch.arange(4)[:, None] * 10 + torch.arange(3)  # step, environment
    for step in range(4):
        here = {name: mark[step] + 50 * place for place, name in enumerate(spec.names)}
        masks = {
            name: torch.nn.functional.one_hot(choice, 100).bool() for name, choice in here.items()
        }
        flags = mark[step] % 2 == 0
        rollout.add_decision(mark[step][:, None], masks, here, here, mark[step], flags, ~flags)
        rollout.add_outcome(mark[step], flags, ~flags)
    rows = rollout.rows(torch.tensor([2, 0]))
    expected = mark[:, [2, 0]].T
    assert torch.equal(rows.states[..., 0], expected.float())
    assert torch.equal(rows.values, expected.float())
    assert torch.equal(rows.valid, expected % 2 == 0)
    assert torch.equal(rows.starts, expected % 2 == 1)
    assert rows.hidden[0].flatten().tolist() == rows.hidden[1].flatten().tolist() == [2, 0]
    for place, name in enumerate(spec.names):
        assert torch.equal(rows.choices[name], expected + 50 * place)
        assert torch.equal(rows.log_probs[..., place], (expected + 50 * place).float())
        assert torch.equal(rows.masks[name].int().argmax(-1), expected + 50 * place)


def test_what_was_seen_before_an_episode_began_changes_nothing_after_it():
    agent = growth_agent()
    rollout = growth_rollout(agent)
    rollout.starts[:] = False
    rollout.starts[4] = True

    def judged():
        rows = rollout.rows(torch.arange(4))
        said = agent.network.evaluate_actions(
            rows.states, rows.choices, rows.masks, rows.hidden, rows.starts
        )
        return torch.stack([*said.log_probs.values(), said.values])

    before = judged()
    rollout.states[:4] += 1
    rollout.hidden = tuple(state + 1 for state in rollout.hidden)
    after = judged()
    assert torch.equal(before[:, :, 4:], after[:, :, 4:])
    assert not torch.equal(before[:, :, :4], after[:, :, :4])


# -- statistics and states over one update ---------------------------------------------------------


def stats_of(network):
    return bytes_of(network.observation_stats), bytes_of(network.return_stats)


def test_statistics_stand_still_until_the_last_minibatch_and_change_once_after():
    env = clocks(3, NEXT_STEP, [4, 6, None])
    agent = agent_for(env)
    network, seen, changes = agent.network, [], []
    for name in ("get_action", "look", "evaluate_actions", "follow"):
        real = getattr(network, name)
        setattr(
            network,
            name,
            lambda *a, real=real, **k: (seen.append(stats_of(network)), real(*a, **k))[1],
        )
    agent._evaluate = network.evaluate_actions
    update = network.observation_stats.update
    network.observation_stats.update = lambda *a: (changes.append(a), update(*a))
    player = Player(env, agent, 0)
    decisions = 0
    for updates in (1, 2, 3):
        seen.clear()
        frozen = stats_of(network)
        rollout = player.play(8)
        decisions += int(rollout.valid.sum())
        agent.update(rollout)
        assert len(seen) > 8
        assert all(moment == frozen for moment in seen)
        assert all(after != before for after, before in zip(stats_of(network), frozen, strict=True))
        assert len(changes) == updates
        assert network.observation_stats.count == network.return_stats.count == decisions


def test_statistics_take_in_the_stored_observations_and_the_returns():
    player = player_for(clocks(3, NEXT_STEP, [4, 6, None]))
    rollout = player.play(16)
    returns = rollout.targets(SMALL.gamma, SMALL.gae_lambda).returns
    states = rollout.states[rollout.valid].double()
    player.agent.update(rollout)
    network = player.agent.network
    torch.testing.assert_close(network.observation_stats.mean, states.mean(0))
    torch.testing.assert_close(network.observation_stats.var, states.var(0, unbiased=False))
    torch.testing.assert_close(
        network.return_stats.mean, returns[rollout.valid].double().mean()[None]
    )


def test_rows_that_are_whole_episodes_have_no_stale_states():
    agent = growth_agent()
    assert agent.update(growth_rollout(agent, whole=True)).stale_state_error == 0.0


def test_rows_that_go_on_report_how_stale_their_states_have_become():
    """A mean square of h, whose entries lie in (-1, 1).

    On CartPole with the defaults it was 0.001 to 0.03.
    """
    agent = growth_agent()
    assert 0 < agent.update(growth_rollout(agent, ends=0.0)).stale_state_error < 0.03


def test_states_are_not_stale_when_nothing_was_learned():
    agent = growth_agent()
    rollout = growth_rollout(agent, ends=0.0)
    rollout.log_probs -= 1.0  # far too large a divergence: no step is taken
    record = agent.update(rollout)
    assert record.steps == 0
    assert record.stale_state_error < 1e-12
