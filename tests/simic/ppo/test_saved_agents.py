"""Agents that are saved and loaded:

the same acts, the same learning, and growth policies that other commands take.
"""

import os
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from safetensors.torch import save_file

import esper
from esper.leyline.errors import CheckpointMismatchError, EsperError, SaveError
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.slots import SlotConfig
from esper.simic.ppo.any_env import Player
from esper.simic.ppo.codecs import Spaces
from esper.simic.ppo.settings import PPOConfig
from esper.simic.training import train_ppo
from esper.storage import runfolder
from esper.tamiyo.heads import Head, HeadSpec
from esper.tamiyo.network import RecurrentActorCritic
from esper.tamiyo.policy_files import load_fitting, seal
from esper.tamiyo.policy_files import read as read_policy
from esper.trials.arms import Entry, run_entries
from simic.growths import POINTS, grow
from simic.ppo.test_any_env import any_env
from simic.tiny_runs import tiny
from simic.worlds import SMALL, bytes_of


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """An agent that `learn` taught on growth, with nothing said but the steps and a smaller
    network.
    """
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
        policies.append(policy.lacking)
        return policy

    (run,) = run_entries(task, [Entry("learned", 3, build)])
    assert (run.result.epochs, policies) == (4, [()])


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda names: names[1:], "no host.epochs, which is read here"),
        (lambda names: [*names, "host.weather"], "host.weather, which is not read here"),
        (lambda names: names[::-1], "in another order"),
    ],
)
def test_a_policy_that_reads_other_features_is_refused_in_one_line(
    grown, tmp_path, change, difference
):
    tensors, plain = read_policy(grown[1])
    layout = vars(plain["layout"])
    layout = {**layout, "features": list(change(list(layout["features"])))}
    path = tmp_path / "other.safetensors"
    path.write_bytes(seal(tensors, {**plain, "layout": layout}))
    space = ActionSpace.of(SlotConfig(("r0c0",)), ("mlp",))
    with pytest.raises(CheckpointMismatchError, match=rf"^[^\n]*{difference}[^\n]*$"):
        load_fitting(path, space)


def test_an_agent_that_is_loaded_acts_and_learns_as_the_saved_one(grown):
    agent, path = grown
    again = esper.PPOAgent.load(path)
    assert (again.config, again.decisions, again.updates) == (
        agent.config,
        agent.decisions,
        agent.updates,
    )
    assert again.network.spec == agent.network.spec
    assert bytes_of(again.network) == bytes_of(agent.network)
    obs = np.random.default_rng(0).normal(size=(5, agent.network.state_dim)).astype(np.float32)
    acts = [one.act(obs, deterministic=False)[0] for one in (agent, again)]
    np.testing.assert_array_equal(*acts)
    states = [one.optimizer.state_dict()["state"] for one in (agent, again)]
    assert all(
        torch.equal(value, states[1][k][name])
        for k, own in states[0].items()
        for name, value in own.items()
    )


def test_an_agent_of_another_kind_of_device_acts_alike_and_draws_anew(grown, tmp_path):
    agent, path = grown
    tensors, plain = read_policy(path)
    (tmp_path / "gpu.safetensors").write_bytes(
        seal({**tensors, "draws": torch.zeros(16, dtype=torch.uint8)}, plain)
    )
    again = esper.PPOAgent.load(tmp_path / "gpu.safetensors")
    obs = np.random.default_rng(0).normal(size=(5, agent.network.state_dim)).astype(np.float32)
    np.testing.assert_array_equal(*(one.act(obs)[0] for one in (agent, again)))


PAIRS = Head("first", 3), Head("second", 2, "first", (0, 2))
OTHERS = {
    "box": (Box(-1, 1, (2, 3), np.float32), Discrete(2), None),
    "starts": (Discrete(4, start=-2), Discrete(3, start=5), None),
    "several": (
        MultiDiscrete([2, 3], start=[1, 7]),
        MultiDiscrete([[2, 3]], dtype=np.int32, start=[[1, 4]]),
        None,
    ),
    "bits": (MultiBinary(3), MultiBinary([2, 2]), None),
    "chained": (Box(-1, 1, (3,), np.float32), MultiDiscrete([3, 2]), HeadSpec(PAIRS, chained=True)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_agent_of_another_environment_acts_and_learns_as_the_saved_one(name, tmp_path):
    seen, actions, spec = OTHERS[name]
    agent = esper.learn(any_env(seen, actions), 24, SMALL, spec=spec)
    agent.save(tmp_path / "other.safetensors")
    again = esper.PPOAgent.load(tmp_path / "other.safetensors")
    assert again.layout is None
    assert again.network.spec == agent.network.spec
    for one in (agent, again):
        one.update(Player(any_env(seen, actions), one, seed=3).play(4))  # fewer than an episode has
    assert (again.decisions, again.updates) == (agent.decisions, agent.updates)
    assert bytes_of(again.network) == bytes_of(agent.network)
    seen.seed(0)
    obs = np.stack([seen.sample() for _ in range(5)])
    first, second = (one.act(obs, deterministic=False)[0] for one in (agent, again))
    np.testing.assert_array_equal(first, second)
    assert first.dtype == second.dtype


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    path = tmp_path_factory.mktemp("other") / "other.safetensors"
    esper.learn(any_env(MultiBinary(3), MultiBinary(2)), 24, SMALL).save(path)
    return path


def test_an_agent_of_another_environment_grows_nothing(other):
    with pytest.raises(SaveError, match=r"other\.safetensors .* growth; "):
        load_fitting(other, ActionSpace.of(SlotConfig.default(), ("norm",), ("linear",)))


@pytest.mark.parametrize(
    "forged",
    [
        {"observation": {"kind": "MultiBinary", "n": 10**15}},
        {"action": {"kind": "MultiBinary", "n": [10**9, 10**9]}},
        {"action": {"kind": "Dict"}},
        {"width": 10**15},
        {"hidden_dim": 10**9},
    ],
    ids=str,
)
def test_a_forged_file_is_refused_in_one_line(forged, other, tmp_path):
    tensors, plain = read_policy(other, Spaces)
    plain["layout"] = asdict(plain["layout"]) | forged
    path = tmp_path / "forged.safetensors"
    path.write_bytes(seal(tensors, plain))
    with pytest.raises(EsperError, match=r"forged\.safetensors(?!.*checksum)"):
        esper.PPOAgent.load(path)


def test_an_agent_without_spaces_is_not_saved(tmp_path):
    agent = esper.PPOAgent(
        RecurrentActorCritic(3, HeadSpec.independent([2]), hidden_dim=8, head_dim=8)
    )
    with pytest.raises(SaveError, match=r"other\.safetensors.*codecs"):
        agent.save(tmp_path / "other.safetensors")
    assert not list(tmp_path.iterdir())


def test_one_changed_bit_anywhere_is_refused(other, tmp_path):
    path = tmp_path / "changed.safetensors"
    whole = other.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 7), *range(header, len(whole), len(whole) // 200)]:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(SaveError, match=r"changed\.safetensors"):
            esper.PPOAgent.load(path)
    path.write_bytes(whole)
    assert esper.PPOAgent.load(path)


def test_an_agent_is_written_over_nothing_but_a_policy_file(grown, tmp_path):
    agent, _ = grown
    path = tmp_path / "mine.safetensors"
    agent.save(path)
    agent.save(path)
    assert esper.PPOAgent.load(path).updates == agent.updates
    tensors = tmp_path / "tensors.safetensors"
    save_file({"mine": torch.zeros(1)}, tensors)
    (tmp_path / "events-0.jsonl").write_text("{}\n")
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tensors, tmp_path / "events-0.jsonl", tmp_path / "link", tmp_path / "pipe"):
        before = other.lstat()
        with pytest.raises(SaveError, match=f"{other.name} is .*only a policy file .* is replaced"):
            agent.save(other)
        assert (other.lstat().st_ino, other.lstat().st_size) == (before.st_ino, before.st_size)


def test_a_checkpoint_without_its_learner_says_so(grown, tmp_path):
    tensors, plain = read_policy(grown[1])
    bare = {name: value for name, value in plain.items() if name != "learner"}
    (tmp_path / "bare.safetensors").write_bytes(seal(tensors, bare))
    with pytest.raises(SaveError, match="--policy"):
        esper.PPOAgent.load(tmp_path / "bare.safetensors")


@pytest.mark.parametrize("before", [3, 4])
def test_a_policy_of_an_earlier_version_is_refused_in_one_line(grown, tmp_path, before):
    tensors, plain = read_policy(grown[1])
    (tmp_path / "old.safetensors").write_bytes(seal(tensors, {**plain, "format": before}))
    line = rf"^[^\n]*format {before}, [^\n]*read other numbers; train a new one[^\n]*$"
    with pytest.raises(SaveError, match=line):
        read_policy(tmp_path / "old.safetensors")


def test_training_from_python_leaves_a_run_folder_and_goes_on(tmp_path):
    config = tiny(tmp_path / "run", rounds=1)
    rounds = []
    agent = esper.train_ppo(config, watch=rounds.append)
    assert len(rounds) == agent.updates == 1
    assert runfolder.read_json(config.out / runfolder.CONFIG)["rounds"] == 1
    assert (config.out / runfolder.EVENTS).stat().st_size
    with pytest.raises(SaveError, match="--resume"):
        train_ppo(config)
    with pytest.raises(EsperError, match=r"dict.*TrainingConfig\.of"):
        train_ppo({"rounds": 1})
    more = esper.train_ppo(config.with_changes([("rounds", 2)], "the test"), resume=True)
    (newest,) = (config.out / runfolder.CHECKPOINTS).glob("round-000002*")
    assert bytes_of(esper.PPOAgent.load(newest).network) == bytes_of(more.network)
    more.save(tmp_path / "mine.safetensors")
    loaded = esper.PPOAgent.load(tmp_path / "mine.safetensors")
    assert loaded.facts["task"]["name"] == "blobs"
    assert loaded.layout == more.layout
