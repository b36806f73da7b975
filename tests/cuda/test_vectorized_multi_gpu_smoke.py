"""Hosts over all GPUs, at most two:

they land there, train, and teach a policy by PPO. Made-up data only.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from esper.runtime.devices import describe_map
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.simic import trainer
from esper.simic.config import TrainingConfig
from esper.simic.environment import GrowthVectorEnv
from esper.simic.trainer import train_ppo_vectorized
from null_sink import NullSink
from runtime.episodes import GERMINATE, QUICK, image_splits, play

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEVICES = [f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))]

PHOTOS = replace(
    get_task("cifar10"),
    load=lambda root: image_splits(count=400, size=32, channels=3, contrast=20),
    epoch_examples=256,
    batch=64,
    lr=0.02,
    epochs=8,
    lengths=QUICK,
)


@pytest.fixture(params=["eager", "graphed"])
def population(request):
    return Population(PHOTOS, [1, 2, 3, 4], DEVICES, executor=request.param)


def devices_of(run):
    return {parameter.device for parameter in run.model.parameters()} | {
        run.splits.train.inputs.device,
        run.sums.device,
    }


@two_gpus
def test_hosts_land_on_both_devices(population):
    landed = [devices_of(run) for run in population.runs]
    assert landed == [{torch.device("cuda", index)} for index in (0, 0, 1, 1)]
    assert Counter(population.placed) == {torch.device("cuda:0"): 2, torch.device("cuda:1"): 2}
    assert describe_map(population.placed) == "cuda:0: 2 hosts, cuda:1: 2 hosts"


def test_hosts_on_all_devices_train_and_grow(population):
    first = [reading.train_loss for reading in population.train_epoch()]
    population.evaluate()
    play(population, 4, {host: {0: [(GERMINATE, "r0c1", "conv_light")]} for host in (0, 3)})
    last = population.readings()
    assert all(math.isfinite(reading.held_out_loss) for reading in last)
    assert all(reading.train_loss < before for reading, before in zip(last, first, strict=True))
    assert [len(run.model.slot("r0c1").fossils) for run in population.runs] == [1, 0, 0, 1]
    assert all(len(devices_of(run)) == 1 for run in population.runs)


def test_the_final_report_comes_from_all_devices(population):
    population.train_epoch()
    assert all(0 <= final.accuracy <= 1 for final in population.final_scores())


# -- PPO -------------------------------------------------------------------------------------------


def train_policy(folder, monkeypatch, **changes):
    """Two rounds of PPO; the agent, its rounds, and every device that a host was on."""
    config = {
        "task": {"name": "blobs", "epochs": 5, "epoch_examples": 128},
        "hosts": 4,
        "host_pool": 4,
        "rounds": 2,
        "initial_wait": 0.5,
        "devices": DEVICES,
        "out": str(folder),
        "ppo": {"epochs": 2, "minibatches": 2, "lr": 0.01},
        **changes,
    }
    rounds, landed, step = [], [], GrowthVectorEnv.step_async

    def noting(env, actions):
        landed.append([str(next(iter(devices_of(run)))) for run in env.population.runs])
        return step(env, actions)

    monkeypatch.setattr(GrowthVectorEnv, "step_async", noting)
    folder.mkdir()
    agent = train_ppo_vectorized(TrainingConfig.of(config), sink=NullSink(), watch=rounds.append)
    return agent, rounds, landed


def assert_learned(agent, rounds):
    """Two updates of real steps, from finite readings, and a policy whose weights have moved and
    are finite.
    """
    assert (agent.updates, agent.decisions) == (2, 2 * 4 * 4)
    for event in rounds:
        assert event.update["steps"] > 0
        assert event.update["skipped_steps"] == 0
        assert math.isfinite(event.mean_return)
        assert 0.0 <= event.accuracy <= 1.0
        assert sum(event.ops.values()) == 16
        assert max(event.update["first_ratio_gap"].values()) <= 1e-4
    assert sum(event.germinated for event in rounds) > 0
    assert all(bool(parameter.isfinite().all()) for parameter in agent.network.parameters())


@pytest.mark.parametrize("policy_device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("executor", ["eager", "graphed"])
def test_hosts_on_all_devices_teach_one_policy(executor, policy_device, tmp_path, monkeypatch):
    taught = train_policy(
        tmp_path / "run", monkeypatch, executor=executor, policy_device=policy_device
    )
    agent, rounds, landed = taught
    assert_learned(agent, rounds)
    each = 4 // len(DEVICES)
    found = [
        device for own in landed for device in own
    ]  # graphed hosts come in two parts, one after the other
    assert (
        found == [device for device in DEVICES for _ in range(each)] * 8
    )  # two rounds of four steps
    assert str(agent.device) == policy_device


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_hosts_in_half_precision_teach_a_policy(amp, tmp_path, monkeypatch):
    used, build = [], trainer.build_environment

    def noting(*arguments):
        env = build(*arguments)
        used.extend(run.amp for run in env.population.runs)
        return env

    monkeypatch.setattr(trainer, "build_environment", noting)
    agent, rounds, _ = train_policy(tmp_path / "run", monkeypatch, amp=amp)
    assert_learned(agent, rounds)
    assert set(used) == {{"bf16": torch.bfloat16, "fp16": torch.float16}[amp]}
    assert {parameter.dtype for parameter in agent.network.parameters()} == {torch.float32}
