"""One growing host as an ordinary environment, checked and played by other people's code."""

import runpy
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from cases import is_legal
from esper.leyline.factored_actions import OP_GERMINATE, FactoredAction
from simic.growths import (
    BUSY,
    POINTS,
    WAIT,
    grow,
    play,
    scripted,
)

GrowthEnv = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "one_host.py"))["GrowthEnv"]


def test_one_host_passes_gymnasiums_own_check(twins):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(GrowthEnv(grow(POINTS, 1, twins)), skip_render_check=True)


def test_one_host_is_the_vector_environments_host(twins):
    single, many = GrowthEnv(grow(POINTS, 1, twins)), play(grow(POINTS, 1, twins), scripted(BUSY))
    obs, info = single.reset(seed=0)
    assert np.array_equal(obs, many[0].obs[0])
    for step, expected in enumerate(many[1:]):
        obs, reward, terminated, truncated, info = single.step(BUSY.get(step, WAIT))
        assert np.array_equal(obs, expected.obs[0])
        assert (reward, terminated, truncated) == (
            expected.rewards[0],
            expected.terminated[0],
            False,
        )
        assert info["reward_parts"] == expected.info["reward_parts"][0]
        assert all(
            np.array_equal(mask, expected.info["action_mask"][k][0])
            for k, mask in info["action_mask"].items()
        )


def test_a_view_of_one_host_is_of_one_host(twins):
    with pytest.raises(ValueError, match="cannot show 2"):
        GrowthEnv(grow(POINTS, 2, twins))


def test_the_flat_mask_allows_a_choice_if_and_only_if_some_legal_action_makes_it(twins):
    """Heads of other people's agents do not depend on each other, so no more can be said than head
    by head.
    """
    env = GrowthEnv(grow(POINTS, 1, twins))
    env.reset(seed=0)
    sizes = env.action_space.nvec.tolist()
    for step in range(POINTS.epochs - 1):
        view = env.hosts.population.views()[0]
        possible = [WAIT]
        for op, slot, blueprint, blend in product(*(range(size) for size in sizes)):
            action = FactoredAction.from_indices(
                op_idx=op,
                slot_idx=slot,
                blueprint_idx=blueprint,
                blend_idx=blend,
                space=env.hosts.space,
            )
            if op != 0 and is_legal(action, view):
                possible.append(
                    (op, slot, blueprint, blend) if op == OP_GERMINATE else (op, slot, 0, 0)
                )
        allowed = np.split(env.action_masks(), np.cumsum(sizes)[:-1])
        for head in (0, 1):
            assert set(np.flatnonzero(allowed[head])) == {action[head] for action in possible}
        assert {action[2] for action in possible if action[0] == OP_GERMINATE} <= set(
            np.flatnonzero(allowed[2])
        )
        assert {0} <= set(np.flatnonzero(allowed[3])) <= {action[3] for action in possible}
        env.step(BUSY.get(step, WAIT))


def test_maskable_ppo_plays_two_hundred_steps(twins):
    contrib = pytest.importorskip("sb3_contrib")
    env = GrowthEnv(grow(replace(POINTS, epoch_examples=32), 1, twins))
    agent = contrib.MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=50,
        batch_size=25,
        n_epochs=1,
        policy_kwargs={"net_arch": [8]},
        seed=0,
        device="cpu",
    )
    agent.learn(200)
    assert agent.num_timesteps == 200
    assert env.hosts.begun == 1 + 200 // (POINTS.epochs - 1)
