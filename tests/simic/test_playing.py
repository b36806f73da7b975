"""Playing a vector environment:

episodes that end at once or a step later, penalties, masks, and filler nowhere.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cases import with_slow
from esper.leyline.errors import EnvironmentMismatchError, MaskError
from esper.simic import learn
from esper.simic.ppo.any_env import Player
from esper.tamiyo.heads import Head, HeadSpec
from simic.worlds import (
    NEXT_STEP,
    SAME_STEP,
    SMALL,
    Clock,
    agent_for,
    bytes_of,
    clocks,
    codecs_of,
    player_for,
)

MODES = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=["next_step", "same_step"])


# -- ends of episodes ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, None, "NextStep", "SameStep"])
def test_another_way_of_resetting_is_refused(mode):
    env = clocks(2)
    env.metadata = {**env.metadata, "autoreset_mode": mode}
    with pytest.raises(
        EnvironmentMismatchError, match=r"autoreset_mode=.*Supported: NEXT_STEP and SAME_STEP"
    ):
        learn(env, 100, SMALL)


def test_a_reset_that_takes_a_step_is_filler_and_one_that_does_not_is_none():
    later, at_once = (
        player_for(clocks(2, mode, [3, None])).play(9) for mode in (NEXT_STEP, SAME_STEP)
    )
    assert later.valid[:, 0].int().tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert later.starts[:, 0].int().tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert later.ended[:, 0].int().tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert at_once.valid.all()
    assert at_once.starts[:, 0].int().tolist() == [1, 0, 0] * 3
    assert at_once.ended[:, 0].int().tolist() == [0, 0, 1] * 3


def test_filler_goes_on_into_the_next_rollout():
    player = player_for(clocks(2, NEXT_STEP, [3, None]))
    player.play(3)
    rollout = player.play(3)
    assert rollout.valid[:, 0].int().tolist() == [0, 1, 1]
    assert rollout.starts[:, 0].int().tolist() == [0, 1, 0]
    assert rollout.states[1, 0].tolist() == [0, 0, 1]  # the second episode of environment 0


@MODES
def test_decisions_are_counted_without_filler(mode):
    player = player_for(clocks(3, mode, [2, 3, None]))
    rollout = player.play(12)
    record = player.agent.update(rollout)
    assert record.decisions == player.agent.decisions == int(rollout.valid.sum())
    assert record.heads["action_0"].steps == record.decisions
    assert (record.decisions < 36) == (mode is NEXT_STEP)


def test_filler_has_no_advantage_and_no_return():
    rollout = player_for(clocks(2, NEXT_STEP, [3, 4])).play(10)
    for found in rollout.targets(0.9, 0.8):
        assert found[~rollout.valid].eq(0).all()
        assert found[rollout.valid].ne(0).all()


@pytest.mark.parametrize("poison", [1e6, np.nan], ids=["large", "nan"])
def test_what_stands_at_filler_steps_changes_no_bit_of_what_is_learned(poison):
    """The last observation of an episode that terminated is shown at a filler step; nothing may
    come of it.
    """
    trained = [
        learn(clocks(3, NEXT_STEP, [3, 5, None], last=last, masked=True), 144, SMALL).network
        for last in (0.0, poison)
    ]
    assert bytes_of(trained[0]) == bytes_of(trained[1])
    assert all(value.isfinite().all() for value in trained[1].state_dict().values())


def test_poisoned_filler_of_a_rollout_changes_no_bit():
    learned = []
    for poison in (False, True):
        player = player_for(clocks(3, NEXT_STEP, [3, 5, None]))
        rollout = player.play(16)
        filler = ~rollout.valid
        if poison:
            rollout.choices[filler] = 2
            rollout.rewards[filler], rollout.values[filler] = 1e3, -1e3
            rollout.log_probs[filler], rollout.states[filler] = -9.0, 7.0
            rollout.after_values[filler], rollout.terminated[filler] = 5e3, True
        record = player.agent.update(rollout)
        learned.append((bytes_of(player.agent.network), record))
    assert learned[0][0] == learned[1][0]
    assert learned[0][1] == learned[1][1]


def live_value(network, rows, last):
    """Value of `last` seen after all of `rows` by a network that began with them."""
    hidden = network.follow(torch.as_tensor(np.array(rows))[None], network.get_initial_hidden(1))
    return network.look(torch.as_tensor(last)[None], hidden).item()


@MODES
@torch.no_grad()
def test_a_truncated_episode_is_worth_its_last_observation_seen_with_its_own_memory(mode):
    player = player_for(clocks(2, mode, [4, 6], ends="truncated", last=50.0))
    rollout = player.play(18)
    network = player.agent.network
    checked = 0
    for host in range(2):
        rows = []
        for step in range(18):
            if rollout.starts[step, host]:
                rows = []
            if rollout.valid[step, host]:
                rows.append(rollout.states[step, host].numpy())
            if rollout.truncated[step, host]:
                expected = live_value(network, rows, np.full(3, 50.0, np.float32))
                assert rollout.after_values[step, host].item() == pytest.approx(expected, abs=1e-5)
                checked += 1
    assert checked >= 5


@torch.no_grad()
def test_an_episode_that_goes_on_is_worth_what_the_next_observation_is_worth():
    player = player_for(clocks(3))
    for _ in range(2):
        rollout = player.play(6)
        assert torch.equal(rollout.after_values[:-1], rollout.values[1:])
        assert torch.equal(
            rollout.after_values[-1], player.agent.network.look(player.states, player.hidden)
        )
        assert player.states[:, 1].eq(rollout.states[-1, :, 1] + 1).all()


@MODES
def test_nothing_follows_the_end_of_an_episode(mode):
    """The step after an end has another episode's reward, and the step before does not see it."""
    player = player_for(clocks(1, mode, [4], ends="terminated"))
    rollout = player.play(8)
    returns = rollout.targets(0.9, 1.0).returns[:4, 0]
    rewards = [0.2, 0.3, 0.4, 0.5]
    assert returns.tolist() == pytest.approx(
        [sum(0.9**k * r for k, r in enumerate(rewards[t:])) for t in range(4)]
    )


@MODES
def test_the_penalty_of_a_host_that_fails_reaches_the_learner_on_that_step(mode):
    player = player_for(clocks(4, mode, penalty=-5.0))
    rollout = player.play(12)
    failed = rollout.valid & (rollout.choices[..., 0] == 1)
    assert failed.any()
    assert torch.equal(rollout.terminated & rollout.valid, failed)
    assert rollout.rewards[failed].eq(-5).all()
    advantages, returns = rollout.targets(0.9, 0.8)
    torch.testing.assert_close(returns[failed], torch.full((int(failed.sum()),), -5.0))
    torch.testing.assert_close(advantages[failed], -5.0 - rollout.values[failed])


@pytest.mark.parametrize(
    "mode", with_slow([NEXT_STEP, SAME_STEP], [SAME_STEP]), ids=["next_step", "same_step"]
)
def test_a_failure_that_costs_is_unlearned(mode):
    player = player_for(
        clocks(4, mode, [8] * 4, penalty=-5.0), SMALL.model_copy(update={"lr": 1e-2, "epochs": 4})
    )
    failures = []
    for _ in range(15):
        rollout = player.play(16)
        failures.append(float((rollout.choices[..., 0] == 1)[rollout.valid].float().mean()))
        player.agent.update(rollout)
    assert failures[0] > 0.2
    assert failures[-1] < 0.05


# -- masks -----------------------------------------------------------------------------------------


class Asked(Clock):
    """A clock whose mask has to be asked for."""

    def action_masks(self):
        return [index == self.time % 3 for index in range(3)]


class Wrapped(gym.Wrapper):
    pass


@MODES
def test_masks_are_read_from_info(mode):
    player = player_for(clocks(3, mode, [5, 7, None], masked=True))
    rollout = player.play(20)
    times, episodes = rollout.states[..., 1].long(), rollout.states[..., 2].long()
    forbidden = (times + torch.arange(3) + episodes) % 3
    expected = torch.arange(3) != forbidden[..., None]
    assert torch.equal(rollout.masks["action_0"][rollout.valid], expected[rollout.valid])
    assert (rollout.choices[..., 0] != forbidden)[rollout.valid].all()


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("wrap", [lambda env: env, Wrapped], ids=["bare", "wrapped"])
def test_masks_are_asked_for_where_environments_have_them_even_in_other_processes(vector, wrap):
    env = vector([lambda: wrap(Asked(epochs=4))] * 2)
    try:
        rollout = player_for(env).play(10)
        assert torch.equal(
            rollout.choices[..., 0][rollout.valid],
            (rollout.states[..., 1].long() % 3)[rollout.valid],
        )
        assert rollout.masks["action_0"][rollout.valid].sum(-1).eq(1).all()
    finally:
        env.close()


def test_without_masks_nothing_is_stored_or_forbidden():
    rollout = player_for(clocks(3)).play(30)
    assert rollout.masks == {}
    assert set(rollout.choices.flatten().tolist()) == {0, 1, 2}


class Sometimes(Clock):
    """Gives a mask at the reset only, or after it only."""

    def __init__(self, who, at_reset):
        super().__init__(who)
        self.at_reset = at_reset

    def info(self, is_last):
        return {"action_mask": np.ones(3, bool)} if (self.time == 0) == self.at_reset else {}


@pytest.mark.parametrize(("at_reset", "word"), [(True, "no"), (False, "an")])
def test_masks_that_come_and_go_are_refused(at_reset, word):
    env = SyncVectorEnv([lambda: Sometimes(0, at_reset)] * 2)
    with pytest.raises(EnvironmentMismatchError, match=rf"\[0, 1\] .*{word} action_mask"):
        learn(env, 100, SMALL)


def test_a_mask_of_only_some_environments_is_refused_by_their_numbers():
    env = SyncVectorEnv([lambda: Clock(0, masked=True), lambda: Clock(1)])
    with pytest.raises(EnvironmentMismatchError, match=r"\[1\] .*action_mask"):
        learn(env, 100, SMALL)


def test_masks_may_be_lists():
    class Listed(Clock):
        def info(self, is_last):
            return {"action_mask": [False, True, False]}

    rollout = player_for(SyncVectorEnv([Listed] * 2)).play(5)
    assert rollout.choices.eq(1).all()


CHAIN = HeadSpec((Head("op", 2), Head("place", 3, "op", (1,))), chained=True)


class Chained(Clock):
    """Masks per head: op 1 may only be placed where the clock points to, op 0 has no place."""

    def info(self, is_last):
        place = np.array([[True, False, False], np.arange(3) == self.time % 3])
        return {"action_mask": {"op": np.array([True, True]), "place": place}}


@MODES
def test_masks_may_come_per_head_with_a_row_for_every_earlier_choice(mode):
    env = SyncVectorEnv(
        [lambda: Chained(epochs=5, actions=gym.spaces.MultiDiscrete([2, 3]))] * 2,
        autoreset_mode=mode,
    )
    agent = agent_for(env, SMALL.model_copy(update={"minibatches": 1}))
    agent.codecs = codecs_of(env, CHAIN)
    torch.manual_seed(0)
    agent = type(agent)(
        type(agent.network)(3, CHAIN, hidden_dim=16), agent.config, codecs=agent.codecs
    )
    rollout = Player(env, agent, 0).play(20)
    assert rollout.masks["place"].shape == (20, 2, 2, 3)
    ops, places = rollout.choices.unbind(-1)
    placed = rollout.valid & (ops == 1)
    assert torch.equal(places[placed], (rollout.states[..., 1].long() % 3)[placed])
    assert places[rollout.valid & (ops == 0)].eq(0).all()
    record = agent.update(rollout)
    assert max(record.first_ratio_gap.values()) <= 1e-6
    assert record.heads["place"].steps == int(placed.sum())


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (np.ones((2, 4), bool), r"'place' .*\(2, 4\); .*\[2, 3\] or \[2, 2, 3\]"),
        (np.ones((1, 2, 3), bool), r"'place' .*\(1, 2, 3\)"),
        (np.ones((2, 3, 3), bool), r"'place' .*\(2, 3, 3\)"),
        (None, "mask .*'place'"),
    ],
)
def test_a_mask_per_head_that_does_not_fit_is_refused(place, words):
    actions = codecs_of(clocks(2, actions=gym.spaces.MultiDiscrete([2, 3])), CHAIN)[1]
    masks = {"op": np.ones((2, 2), bool), **({} if place is None else {"place": place})}
    with pytest.raises(MaskError, match=words):
        actions.split_mask(masks, 2)
