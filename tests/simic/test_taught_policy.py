"""A policy taught on blobs plants what helps and keeps it, and culls what does not help first.

There is a budget for one seed, and hosts differ: the test plants a lora in half of them, as the
first action of their episodes. While it is there nothing else can grow.
"""

from pathlib import Path

import numpy as np
import pytest

import esper
from esper.leyline.factored_actions import NUM_OPS, OP_GERMINATE, OP_WAIT
from esper.simic.environment import GrowthVectorEnv
from esper.tamiyo.policy_files import load_fitting
from esper.telemetry.events import ActionTaken

pytestmark = pytest.mark.slow

LORA = 1
"""The blueprint of `blobs`, by its place in the action space."""
UNSEEN = range(7000, 7008)
NEARLY_ALL = 7
"""Of the unseen hosts: what is learned from chance may miss one."""
CONFIG = {
    "task": {"name": "blobs", "max_seeds": 1, "epoch_examples": 432},
    "hosts": 12,
    "host_pool": 16,
    "rounds": 60,
    "telemetry": {"level": "minimal"},
    # a seed that is planted and culled again costs something
    "reward": {"weights": {"churn": 0.1}},
    "ppo": {
        "epochs": 8,
        "minibatches": 4,
        "hidden_dim": 64,
        "head_dim": 32,
        "entropy": 0.02,
        "entropy_floor": 0.0,
    },
}


class WithLora(GrowthVectorEnv):
    """Hosts of which every `step`-th begins its episodes with a lora, in either slot in turn."""

    step_of_lora = 2

    def hosts_with_lora(self):
        """Hosts whose first action is the test's."""
        for host, run in enumerate(self.population.runs):
            if host % self.step_of_lora == 0 and run.epoch == 1 and not self.is_over[host]:
                yield host

    def _see(self, happened, more):
        """What the test does is no choice of the policy's, which would learn from it."""
        obs, info = super()._see(happened, more)
        for host in self.hosts_with_lora():
            info["action_mask"]["op"][host] = [op == OP_WAIT for op in range(NUM_OPS)]
        return obs, info

    def step_async(self, actions):
        actions = np.array(actions)
        for host in self.hosts_with_lora():
            actions[host] = (OP_GERMINATE, (host // self.step_of_lora) % 2, LORA, 0)
        super().step_async(actions)


class LoraInAll(WithLora):
    step_of_lora = 1


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    """A policy taught for a minute or two."""
    folder = tmp_path_factory.mktemp("taught")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.simic.trainer.GrowthVectorEnv", WithLora)
        esper.train_ppo(esper.TrainingConfig.of({**CONFIG, "out": str(folder / "run")}))
    return sorted((folder / "run" / "checkpoints").glob("*.safetensors"))[-1]


def play(kind, policy_file: Path, folder: Path):
    """What was done on each of the unseen hosts, and the accuracy that they end with."""
    task = esper.TrainingConfig.of(CONFIG).task.build()
    env = kind(task, len(UNSEEN), host_seeds=UNSEEN, folder=folder)
    policy = load_fitting(policy_file, env.space)
    obs, info = env.reset(seed=0)
    memory = None
    ops = [[] for _ in UNSEEN]
    for _ in range(task.epochs - 1):
        actions, memory = policy.decide(obs, info["action_mask"], None, memory)
        obs, _, _, _, info = env.step(actions)
        for of_host, happened in zip(ops, info["events"], strict=True):
            for event in happened:
                if isinstance(event, ActionTaken):
                    of_host.append((event.op, event.slot, event.blueprint))
    return ops, env.accuracy


def is_mlp_grown(ops) -> bool:
    """Whether nothing but mlps was planted and one of them was fossilized at the end.

    The governor may have taken one away, and the policy may move it to the other slot.
    """
    planted = {blueprint for op, _, blueprint in ops if op == "GERMINATE"}
    kept = [op for op, _, _ in ops if op == "FOSSILIZE"]
    return planted == {"mlp"} and len(kept) == 1 and ops[-1][0] == "FOSSILIZE"


def test_the_policy_plants_mlp_and_fossilizes_it(policy_file, tmp_path):
    ops, accuracy = play(GrowthVectorEnv, policy_file, tmp_path)
    assert sum(is_mlp_grown(of_host) for of_host in ops) >= NEARLY_ALL, ops
    assert (accuracy > 0.7).sum() >= NEARLY_ALL


def test_a_lora_that_the_test_planted_is_culled_first(policy_file, tmp_path):
    ops, accuracy = play(LoraInAll, policy_file, tmp_path)
    count = 0
    for planted, first, *later in ops:
        assert planted[::2] == ("GERMINATE", "lora")
        count += first == ("CULL", planted[1], "lora") and is_mlp_grown(later)
    assert count >= NEARLY_ALL, ops
    assert (accuracy > 0.7).sum() >= NEARLY_ALL
