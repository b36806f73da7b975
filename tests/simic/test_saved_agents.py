"""Agents that are saved and loaded: the same acts, the same learning, and growth policies that other commands take."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

import esper
from esper.leyline.errors import SaveError
from esper.leyline.factored_actions import DEFAULT_SPACE
from esper.simic.checkpoints import load_fitting
from esper.simic.config import PPOConfig
from esper.simic.training import train_ppo
from esper.tamiyo.heads import HeadSpec
from esper.telemetry import runfolder
from esper.trials.arms import Entry, run_entries
from simic.growths import POINTS, grow
from simic.test_any_env import any_env
from simic.tiny_runs import tiny
from simic.worlds import SMALL, bytes_of

BOX = Box(-1, 1, (3,), np.float32)
SPACES = {
    "boxes": (BOX, Discrete(3, start=2)),
    "numbers": (Discrete(4, start=1), MultiDiscrete([2, 3], start=[1, 0])),
    "tables": (MultiDiscrete([[2, 3]]), MultiBinary(2)),
    "bits": (MultiBinary((2, 2)), MultiDiscrete([2, 2])),
}


@pytest.mark.parametrize("case", SPACES)
def test_an_agent_that_is_loaded_acts_and_learns_as_the_saved_one(case, tmp_path):
    env = any_env(*SPACES[case])
    agent = esper.learn(env, 48, SMALL, seed=3)
    agent.save(tmp_path / "agent.safetensors")
    again = esper.PPOAgent.load(tmp_path / "agent.safetensors")
    assert (again.config, again.decisions, again.updates) == (agent.config, agent.decisions, agent.updates)
    assert bytes_of(again.network) == bytes_of(agent.network)
    obs, _ = env.reset(seed=1)
    acts = [one.act(obs, deterministic=False)[0] for one in (agent, again)]
    np.testing.assert_array_equal(*acts)
    assert env.action_space.contains(acts[1])
    states = [one.optimizer.state_dict()["state"] for one in (agent, again)]
    assert all(torch.equal(value, states[1][k][name]) for k, own in states[0].items() for name, value in own.items())


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """An agent that `learn` taught on growth, with nothing said but the steps and a smaller network."""
    folder = tmp_path_factory.mktemp("grown")
    config = PPOConfig(horizon=7, hidden_dim=8, head_dim=8, epochs=1)
    agent = esper.learn(grow(replace(POINTS, epochs=4), 2, folder), 28, config)
    agent.save(folder / "grown.safetensors")
    return agent, folder / "grown.safetensors"


def test_growth_is_learned_without_further_words_and_its_heads_are_those_of_growth(grown):
    agent, _ = grown
    assert agent.updates == 2
    assert agent.network.spec == HeadSpec.growth(2, 3, 3)


def test_a_policy_that_learn_taught_plays_as_an_arm(grown):
    _, path = grown
    task = replace(POINTS, epochs=4)
    policies = []

    def build(facts):
        policy = load_fitting(path, facts.space)
        policies.append(policy.reads_telemetry)
        return policy

    (run,) = run_entries(task, [Entry("learned", 3, build)])
    assert (run.result.epochs, policies) == (4, [True])


def test_a_policy_for_something_else_is_not_taken_for_one_of_growth(tmp_path):
    esper.learn(any_env(BOX, Discrete(2)), 24, SMALL).save(tmp_path / "other.safetensors")
    with pytest.raises(SaveError, match=r"other\.safetensors"):
        load_fitting(tmp_path / "other.safetensors", DEFAULT_SPACE)


def test_a_checkpoint_without_its_learner_says_so():
    published = Path(__file__).parents[2] / "examples" / "policies" / "cifar10.safetensors"
    with pytest.raises(SaveError, match="--policy"):
        esper.PPOAgent.load(published)


def test_training_from_python_leaves_a_run_folder_and_goes_on(tmp_path):
    config = tiny(tmp_path / "run", rounds=1)
    rounds = []
    agent = esper.train_ppo(config, watch=rounds.append)
    assert len(rounds) == agent.updates == 1
    assert runfolder.read_json(config.out / runfolder.CONFIG)["rounds"] == 1
    assert (config.out / runfolder.EVENTS).stat().st_size
    with pytest.raises(SaveError, match="--resume"):
        train_ppo(config)
    more = esper.train_ppo(config.with_changes([("rounds", 2)], "the test"), resume=True)
    (newest,) = (config.out / runfolder.CHECKPOINTS).glob("round-000002*")
    assert bytes_of(esper.PPOAgent.load(newest).network) == bytes_of(more.network)
    more.save(tmp_path / "mine.safetensors")
    loaded = esper.PPOAgent.load(tmp_path / "mine.safetensors")
    assert loaded.facts["task"]["name"] == "blobs"
    assert loaded.layout == more.layout
