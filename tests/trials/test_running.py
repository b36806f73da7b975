"""`esper run`:

any policy, the limits it is given, the same episode however often it is stopped, true results.
"""

import json
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch

from cases import with_slow
from epoch_records import grown_epoch
from esper.kasmina import exporting
from esper.kasmina.hosts import build_cnn_host
from esper.leyline.errors import CheckpointMismatchError, EsperError, SaveError
from esper.runtime.population import Population
from esper.runtime.tasks.registry import TASKS
from esper.simic.environment import GrowthVectorEnv
from esper.storage import runfolder
from esper.tamiyo.policies import NetworkPolicy
from esper.tamiyo.policy_files import read as read_policy
from esper.tamiyo.policy_files import seal
from esper.tamiyo.rules import RULES
from esper.telemetry.events import ActionTaken
from esper.trials.arms import Stopped
from esper.trials.config import RunConfig
from esper.trials.running import build
from runtime.episodes import IMAGES
from simic.tiny_runs import checkpoints_in, events_of, tiny, train
from trials.grown_runs import (
    asked_at,
    assert_same_end,
    configured,
    grow,
    grow_epoch_by_epoch,
    stopped,
)
from trials.one_arm import run_arm

SLOTS = ["r0c0", "r0c1"]
"""of `blobs`"""


def trained(folder, **changes):
    """A checkpoint of a policy that was trained for one round."""
    config = tiny(folder, rounds=1, ppo__entropy=0.5, **{"initial_wait": 0.01, **changes})
    train(config)
    return config.out / runfolder.CHECKPOINTS / checkpoints_in(config.out)[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """A policy that was trained without the telemetry features."""
    return trained(tmp_path_factory.mktemp("blind"), observe_telemetry=False)


def planted(folder):
    return [event for event in events_of(folder, "ActionTaken") if event["op"] == "GERMINATE"]


def timeless(result):
    return replace(result, seconds=0.0)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", RULES)
def test_a_rule_does_what_it_does_as_an_arm(policy, tmp_path):
    """Results and events are those of `run_arm` on the same hosts; growing adds the readings of
    every epoch.
    """
    config = configured(tmp_path, policy=policy, seed=3)
    results = grow(config)
    arm = run_arm(config.task.build(), policy, [3, 4])
    assert [timeless(result) for result in results] == [timeless(run.result) for run in arm]
    told = [
        event
        for event in events_of(tmp_path)
        if event["type"] not in ("ArmFinished", "LedgerClosed")
    ]
    for host, run in enumerate(arm):
        own = [{"type": type(event).__name__, **asdict(event)} for event in run.events]
        assert json.loads(json.dumps(own)) == [event for event in told if event["host"] == host]
    assert [event["epoch"] for event in events_of(tmp_path, "HostEpoch")] == [
        e for e in range(1, 9) for _ in range(2)
    ]


OTHERS = ("checkpoint", *sorted({*RULES} - {"heuristic"}), "blind")


@pytest.mark.parametrize("policy", with_slow(["heuristic", *OTHERS], OTHERS))
def test_a_run_that_is_stopped_after_every_epoch_comes_to_the_same_end(policy, request, tmp_path):
    named = policy if policy in RULES else str(request.getfixturevalue(policy))
    whole, cut = (configured(tmp_path / name, policy=named) for name in ("whole", "cut"))
    results = grow(whole)
    assert [timeless(result) for result in grow_epoch_by_epoch(cut)] == [
        timeless(result) for result in results
    ]
    assert_same_end(cut.out, whole.out)


def test_sham_growth_has_the_sham_blueprint_only(tmp_path):
    episodes, _ = build(configured(tmp_path / "a", policy="sham"))
    assert episodes.population.runs[0].model.space.blueprint_ids[1:] == ("sham",)
    results = grow(configured(tmp_path / "b", policy="sham"))
    assert {event["blueprint"] for event in planted(tmp_path / "b")} == {"sham"}
    assert all(
        result.germinated and result.final_params == result.start_params for result in results
    )


def test_a_trained_policy_decides(checkpoint, tmp_path):
    (result, _) = grow(configured(tmp_path, policy=str(checkpoint)))
    assert result.arm == str(checkpoint)
    assert events_of(tmp_path, "ActionTaken"), "chosen so that it does something"


def seen_by(monkeypatch):
    """Every observation that a network is shown from now on, and what it chose."""
    seen = []
    decide = NetworkPolicy.decide

    def watched(self, observation, masks, reports, memory, signals):
        actions, memory = decide(self, observation, masks, reports, memory, signals)
        seen.append((observation[0], actions[0].tolist()))
        return actions, memory

    monkeypatch.setattr(NetworkPolicy, "decide", watched)
    return seen


@pytest.mark.parametrize("policy", ["checkpoint", "blind"])
def test_a_trained_policy_sees_what_the_environment_shows(policy, request, tmp_path, monkeypatch):
    """Epoch by epoch, as if the same host were played in the growth environment with the same
    actions.
    """
    path = str(request.getfixturevalue(policy))
    seen = seen_by(monkeypatch)
    config = configured(tmp_path / "run", policy=path, hosts=1, seed=4)
    grow(config)
    task = config.task.build()
    lacking = () if policy == "checkpoint" else ("telemetry",)
    env = GrowthVectorEnv(task, 1, host_seeds=[4], folder=tmp_path, lacking=lacking)
    shown = [env.reset(seed=0)[0][0]]
    for _, action in seen[: task.epochs - 1]:
        shown.append(env.step(np.array([action]))[0][0])
    assert len(seen) == task.epochs
    assert [
        index for index, (mine, _) in enumerate(seen) if not np.array_equal(mine, shown[index])
    ] == []
    assert any(action[0] for _, action in seen), "chosen so that it does something"


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"task__slots": ["r0c1"]}, "slots"),
        ({"task__blueprints": ["mlp"]}, "blueprints"),
        ({"task__name": "pictures"}, "name"),
    ],
    ids=["slots", "blueprints", "task"],
)
def test_a_policy_taught_on_other_choices_plays_and_says_so(
    changes, difference, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setitem(TASKS, "pictures", replace(IMAGES, name="pictures", epochs=8))
    config = configured(tmp_path, policy=str(checkpoint), **changes)
    said = []
    results = grow(config, say=said.append)
    assert [result.arm for result in results] == [str(checkpoint)] * 2
    assert any("trained for other episodes" in line and difference in line for line in said)
    slots = {event["slot"] for event in planted(tmp_path)}
    assert slots
    assert slots <= set(changes.get("task__slots", SLOTS))


def test_a_policy_that_saw_other_features_is_refused(checkpoint, tmp_path):
    tensors, plain = read_policy(checkpoint)
    plain["layout"] = replace(plain["layout"], features=("mood", *plain["layout"].features[1:]))
    (tmp_path / "old.safetensors").write_bytes(seal(tensors, plain))
    with pytest.raises(CheckpointMismatchError, match=r"reads other features: mood, "):
        grow(configured(tmp_path / "run", policy=str(tmp_path / "old.safetensors")))


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a policy")
    with pytest.raises(SaveError, match=r"notes\.txt .*checkpoint"):
        grow(configured(tmp_path / "run", policy=str(tmp_path / "notes.txt")))


@pytest.mark.parametrize("fate", [pytest.param("overwritten", marks=pytest.mark.slow), "deleted"])
def test_a_run_goes_on_with_the_policy_that_it_was_started_with(fate, checkpoint, blind, tmp_path):
    """Training goes on and replaces or deletes its checkpoints; a run that uses one must not change
    by that.
    """
    path = tmp_path / "best.safetensors"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    path.write_bytes(checkpoint.read_bytes())
    grow(configured(whole, policy=str(path)))
    stopped(configured(cut, policy=str(path)), 3)
    path.write_bytes(blind.read_bytes()) if fate == "overwritten" else path.unlink()
    grow(configured(cut, policy=str(path)), resume=True)
    assert_same_end(cut, whole)


def test_a_new_run_reads_the_policy_anew(checkpoint, blind, tmp_path):
    path = tmp_path / "best.safetensors"
    config = configured(tmp_path / "run", policy=str(checkpoint))
    for source in (checkpoint, blind):
        path.write_bytes(source.read_bytes())
        _, (decider, _) = build(config.model_copy(update={"policy": str(path)}))
        assert decider.policy.lacking == (() if source == checkpoint else ("telemetry",))


# -- limits ----------------------------------------------------------------------------------------


@pytest.fixture
def three_slots(monkeypatch):
    """A CNN with slots r0c0, r0c1, r0c2."""
    host = partial(build_cnn_host, blocks=3, base_channels=2, in_channels=1, image_size=8)
    task = replace(
        IMAGES, name="three", build_host=host, lr=0.02, epochs=8, blueprints=("conv_small", "norm")
    )
    monkeypatch.setitem(TASKS, "three", task)
    return {"task__name": "three", "task__epoch_examples": 64}


def test_only_enabled_slots_are_planted(three_slots, tmp_path):
    grow(configured(tmp_path, task__slots=["r0c0", "r0c2"], policy="schedule", **three_slots))
    assert {event["slot"] for event in planted(tmp_path)} == {"r0c0", "r0c2"}
    stages = events_of(tmp_path, "StageChanged", "GateJudged")
    assert {event["slot"] for event in stages} == {"r0c0", "r0c2"}


def test_counterfactuals_of_enabled_slots_are_those_of_the_same_slots_among_all(
    three_slots, tmp_path
):
    """A host with all its slots, planted in the same two, is measured to the same numbers."""
    config = configured(tmp_path, task__slots=["r0c0", "r0c2"], **three_slots)
    chosen, _ = build(config)
    everything, _ = build(configured(tmp_path, **three_slots))
    found = []
    for population in (chosen.population, everything.population):
        for slot_id in ("r0c0", "r0c2"):
            population.runs[0].model.germinate_seed(slot_id, "conv_small")
            population.runs[0].prime()
        population.tick()
        for _ in range(3):
            population.train_epoch()
            population.evaluate()
            population.tick()
        reports = population.reports()[0]
        found.append([reports[slot_id].metrics for slot_id in ("r0c0", "r0c2")])
        assert all(metrics.counterfactual_contribution for metrics in found[-1])
    assert found[0] == found[1]
    few, all_of_them = (each.population.runs[0].ledger.counts() for each in (chosen, everything))
    assert few.pop("score.flops") < all_of_them.pop("score.flops")  # one slot more has its products
    assert few == all_of_them


@pytest.mark.parametrize("slots", [["r0c5"], ["r0c0", "r1c0"]])
def test_an_unknown_slot_is_refused(slots, tmp_path):
    with pytest.raises(EsperError, match=rf"slot '{slots[-1]}'.* r0c0, r0c1"):
        grow(configured(tmp_path, task__slots=slots))


def largest(folder):
    return max(event["params"] for event in events_of(folder, "HostEpoch"))


@pytest.mark.slow
def test_a_budget_limits_the_parameters(tmp_path):
    """An mlp seed adds five times the host; under a budget of two only lora fits."""
    results = grow(configured(tmp_path / "small", task__budget=2.0))
    assert {event["blueprint"] for event in planted(tmp_path / "small")} == {"lora"}
    grow(configured(tmp_path / "large"))
    assert results[0].start_params < largest(tmp_path / "small") <= 2.0 * results[0].start_params
    assert largest(tmp_path / "large") > 2.0 * results[0].start_params


def test_the_number_of_seeds_is_limited(tmp_path):
    """Live and kept ones together; without the limit both slots are planted."""
    policy = "heuristic:held_out_part=0"  # plants from the first epoch on
    results = grow(configured(tmp_path / "one", policy=policy, task__max_seeds=1))
    free = grow(configured(tmp_path / "free", policy=policy))
    assert [result.germinated for result in free] == [2, 2]
    assert all(result.germinated - result.culled <= 1 for result in results)
    assert {event["epoch"] for event in planted(tmp_path / "one")} == {1}


def test_an_episode_has_the_epochs_that_were_asked_for(tmp_path):
    results = grow(configured(tmp_path, task__epochs=3))
    assert [result.epochs for result in results] == [3, 3]
    assert {event["epoch"] for event in events_of(tmp_path, "HostEpoch")} == {1, 2, 3}


def test_hosts_count_on_from_the_first_seed(tmp_path):
    grow(configured(tmp_path / "three", seed=5, hosts=3, task__epochs=3))
    grow(configured(tmp_path / "last", seed=7, hosts=1, task__epochs=3))
    results = events_of(tmp_path / "three", "ArmFinished")
    assert [result["seed"] for result in results] == [5, 6, 7]
    assert events_of(tmp_path / "last", "ArmFinished") == results[2:]


# -- results ---------------------------------------------------------------------------------------


def test_a_result_counts_what_the_events_say(tmp_path):
    for host, result in enumerate(grow(configured(tmp_path))):
        stages = [
            event["after"] for event in events_of(tmp_path, "StageChanged") if event["host"] == host
        ]
        assert stages.count("FOSSILIZED") + stages.count("CULLED") == result.germinated > 0
        judged = [event for event in events_of(tmp_path, "FossilJudged") if event["host"] == host]
        gone = sum(not event["is_kept"] for event in judged)
        ends = stages.count("FOSSILIZED") - gone, stages.count("CULLED") + gone
        assert (result.fossilized, result.culled) == ends


def test_readings_are_written_for_every_epoch_of_every_host(tmp_path):
    config = configured(tmp_path / "run", policy="never")
    grow(config)
    population = Population(config.task.build(), [0, 1])
    for epoch in range(8):
        population.train_epoch()
        population.evaluate()
        for host, reading in enumerate(population.readings()):
            flops = population.runs[host].ledger.flops
            expected = grown_epoch(
                host,
                epoch + 1,
                reading.train_loss,
                reading.held_out_loss,
                reading.held_out_accuracy,
                114,
                flops,
            )
            expected = replace(expected, steps=3, share=(epoch + 1) / 8)
            assert events_of(config.out, "HostEpoch")[2 * epoch + host] == {
                "type": "HostEpoch",
                **asdict(expected),
            }


def test_whoever_watches_sees_every_epoch(tmp_path):
    seen = []
    grow(configured(tmp_path), watch=lambda epoch, events: seen.append((epoch, events)))
    assert [epoch for epoch, _ in seen] == list(range(8))
    acted = [event for _, events in seen for event in events if isinstance(event, ActionTaken)]
    assert len(acted) == len(events_of(tmp_path, "ActionTaken")) > 0


def test_threads_and_kernels_are_as_before_afterwards(tmp_path):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    grow(configured(tmp_path, task__epochs=2, deterministic=True, threads=2))
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_asking_to_stop_in_the_last_epoch_comes_too_late(tmp_path):
    assert len(grow(configured(tmp_path, task__epochs=3), should_stop=asked_at(3))) == 2


def test_a_stop_says_how_many_epochs_are_saved(tmp_path):
    with pytest.raises(Stopped) as stop:
        grow(configured(tmp_path), should_stop=asked_at(3))
    assert stop.value.epochs == 3


def test_networks_that_cannot_be_written_are_one_clear_error(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(exporting, "save_file", fail)
        with pytest.raises(SaveError, match=r"cannot save .*weights.*No space left.*--resume"):
            grow(configured(tmp_path / "cut"))
    grow(configured(tmp_path / "cut"), resume=True)
    grow(configured(tmp_path / "whole"))
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


# -- the configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"polcy": "never"}, "'polcy'.*'policy'"),
        ({"task": {"nme": "blobs"}}, "'task.nme'.*'task.name'"),
        ({"hosts": 0}, "hosts is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"amp": "fp8"}, 'amp is "fp8"'),
        ({"policy": "heuristik"}, "policy 'heuristik'.*'heuristic'"),
        ({"policy": "runs"}, "policy 'runs'.*`esper ppo`"),
        ({"task": {"name": "blob"}}, "task 'blob'.*'blobs'"),
        ({"task": {"budget": 1.0}}, "task.budget is 1.0"),
        ({"task": {"held_out": 1}}, "task.held_out is 1"),
        ({"task": {"epochs": 1}, "hosts": "many"}, "; hosts is"),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_the_way_out(values, words):
    with pytest.raises(EsperError, match=words) as refusal:
        RunConfig.of(values)
    assert "\n" not in str(refusal.value)


def test_a_configuration_comes_back_from_json(tmp_path):
    config = configured(tmp_path, task__slots=["r0c0"], devices=["cpu"], deterministic=True)
    assert RunConfig.of(json.loads(json.dumps(config.model_dump(mode="json")))) == config
