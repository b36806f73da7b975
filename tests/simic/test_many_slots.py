"""The whole loop with five and with eight slots: act, learn, save, continue."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from esper.cli import main
from esper.kasmina.hosts import build_mlp_host
from esper.leyline.factored_actions import NUM_OPS
from esper.runtime.tasks.registry import TASKS, get_task
from esper.simic.ppo.agent import PPOAgent
from esper.simic.training import train_ppo
from esper.storage import runfolder
from simic.tiny_runs import assert_same_end, checkpoints_in, events_of, tiny

ROUNDS, HOSTS, EPOCHS = 2, 3, 7


@pytest.fixture(params=[5, 8])
def slots(request, monkeypatch):
    """How many slots the host of the task `deep_blobs` has."""
    count = request.param
    build = partial(build_mlp_host, inputs=2, widths=(6,) * count, classes=2)
    task = replace(get_task("blobs"), name="deep_blobs", build_host=build)
    monkeypatch.setitem(TASKS, "deep_blobs", task)
    return count


def config_of(folder, **changes):
    return tiny(
        folder,
        task__name="deep_blobs",
        task__epochs=EPOCHS,
        hosts=HOSTS,
        rounds=ROUNDS,
        telemetry__level="debug",
        **changes,
    )


def test_a_policy_acts_learns_is_saved_and_goes_on(slots, tmp_path):
    ids = [f"r0c{column}" for column in range(slots)]
    whole = config_of(tmp_path / "whole")
    agent = train_ppo(whole)
    assert agent.network.num_slots == slots
    assert agent.decisions == ROUNDS * HOSTS * (EPOCHS - 1)
    assert agent.updates == ROUNDS
    chosen = [row for row in events_of(whole.out, "ACTION_TAKEN") if row["op"] == "GERMINATE"]
    assert len({row["slot_id"] for row in chosen}) > 3
    assert {row["slot_id"] for row in chosen} <= {*ids}
    for row in events_of(whole.out, "RoundFinished"):
        assert row["update"]["heads"]["slot"]["steps"] > 0
        assert max(row["update"]["first_ratio_gap"].values()) < 1e-4

    broken_off = config_of(tmp_path / "resumed")
    train_ppo(broken_off.with_changes([("rounds", 1)], "the test"))
    assert len(checkpoints_in(broken_off.out)) == 1
    resumed = train_ppo(broken_off, resume=True)
    for name, value in agent.network.state_dict().items():
        assert torch.equal(value, resumed.network.state_dict()[name]), name
    assert events_of(broken_off.out, "ACTION_TAKEN") == events_of(whole.out, "ACTION_TAKEN")

    newest = checkpoints_in(whole.out)[-1]
    loaded = PPOAgent.load(whole.out / runfolder.CHECKPOINTS / newest)
    obs = np.zeros((HOSTS, agent.network.state_dim), np.float32)
    (actions, _), (expected, _) = loaded.act(obs), agent.act(obs)
    assert np.array_equal(actions, expected)
    assert actions.shape == (HOSTS, 4)
    assert (actions < [NUM_OPS, slots, 3, 3]).all()


def test_two_devices_learn_what_one_learns(slots, tmp_path):
    one, two = config_of(tmp_path / "one"), config_of(tmp_path / "two", devices=["cpu", "cpu:0"])
    agents = [train_ppo(config) for config in (one, two)]
    first, second = (agent.network.state_dict() for agent in agents)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert events_of(one.out) == events_of(two.out)
    assert_same_end(one.out, two.out)


def test_a_policy_taught_on_many_slots_plays_two_of_them(slots, tmp_path, capsys):
    """The file is that of a run with five or eight slots; its weights know no number of them."""
    taught = config_of(tmp_path / "taught", ppo__entropy=0.5, initial_wait=0.01)
    train_ppo(taught)
    newest = taught.out / runfolder.CHECKPOINTS / checkpoints_in(taught.out)[-1]
    with pytest.raises(SystemExit) as leaving:
        main(
            [
                *("run", "--task", "deep_blobs", "--policy", str(newest)),
                *("--slots", "r0c0", "r0c2", "--epochs", "8", "--hosts", "2"),
                *("--out", str(tmp_path / "played")),
            ]
        )
    assert not leaving.value.code, capsys.readouterr().err
    planted = events_of(tmp_path / "played", "ActionTaken")
    assert planted
    assert {row["slot"] for row in planted} <= {"r0c0", "r0c2"}
    closed = events_of(tmp_path / "played", "LedgerClosed")
    assert all(row["flops"]["policy"] > 0 for row in closed)
