"""Episodes whose clock is compute, in `esper run`, `esper compare` and `esper ppo`:

equal FLOPs, resumed to the bit.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from cli.test_cli import call
from esper.cli import compare as comparing
from esper.cli.run import run_policy
from esper.leyline.errors import SaveError, SettingError
from esper.runtime.population import Population
from esper.runtime.tasks.registry import TASKS
from esper.simic.environment import GrowthVectorEnv
from esper.simic.rewards import FAMILIES
from esper.simic.twins import fingerprint
from esper.storage import runfolder
from esper.trials.config import CompareConfig
from runtime.clocked import CNN, TEXT, text_splits
from simic import tiny_runs
from simic.growths import twin_readings
from simic.tiny_runs import events_of, tiny, train
from trials.grown_runs import assert_same_end, configured, grow, grow_epoch_by_epoch, stopped

QUIET = Console(quiet=True)
HOLDS = {"corpus": "one"}
"""the corpus that the tasks here find"""


@pytest.fixture(autouse=True)
def _tasks(monkeypatch):
    HOLDS["corpus"] = "one"
    load = lambda root: text_splits(corpus=HOLDS["corpus"])  # noqa: E731
    monkeypatch.setitem(TASKS, "text", replace(TEXT, name="text", load=load, epochs=4, compute=0.5))
    monkeypatch.setitem(TASKS, "pictures", replace(CNN, name="pictures", clock="epochs"))


def run_of(out, **changes):
    return configured(
        out, task__name="text", task__epochs=None, task__epoch_examples=None, **changes
    )


# -- esper run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["heuristic", pytest.param("never", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_after_every_decision_comes_to_the_same_end(policy, tmp_path):
    whole, cut = (run_of(tmp_path / name, policy=policy, hosts=1) for name in ("whole", "cut"))
    results = grow(whole)
    assert [replace(result, seconds=0.0) for result in grow_epoch_by_epoch(cut)] == [
        replace(result, seconds=0.0) for result in results
    ]
    assert_same_end(cut.out, whole.out)


def test_every_decision_tells_its_steps_and_the_share_that_is_used(tmp_path):
    (result,) = grow(run_of(tmp_path, hosts=1))
    told = events_of(tmp_path, "HostEpoch")
    budget = Population(TASKS["text"], [0]).runs[0].clock.budget
    assert [event["share"] for event in told] == [event["flops"] / budget for event in told]
    assert all(event["steps"] > 0 for event in told)
    assert told[0]["steps"] > told[-1]["steps"]
    assert 0.9 < result.flops / budget <= 1


def test_a_run_tells_its_budget_and_its_corpus(tmp_path, capsys):
    said = call(
        capsys, *["run", "--task", "text", "--policy", "never", "--out"], str(tmp_path / "run")
    )
    code, out, _ = said
    assert not code
    assert f"{Population(TASKS['text'], [0]).runs[0].clock.budget:.4g} FLOPs" in out
    assert "corpus: one" in out
    saved = json.loads((tmp_path / "run" / runfolder.CONFIG).read_text())
    assert (saved["task"]["clock"], saved["task"]["compute"]) == ("compute", 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--task text --compute 0.001", "compute 0.001 is"),
        ("--task text --compute 0", "task.compute is 0"),
        ("--task blobs --compute 1 --set task.clock=epochs", "clock is epochs, but compute is 1.0"),
        ("--task blobs --set task.clock=steps", 'task.clock is "steps"'),
    ],
)
def test_a_wrong_clock_is_one_line_and_leaves_nothing_behind(options, words, tmp_path, capsys):
    code, _, err = call(capsys, "run", *options.split(), "--out", str(tmp_path / "run"))
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_does_not_go_on_with_another_corpus(tmp_path):
    config = run_of(tmp_path, hosts=1)
    stopped(config, 1)
    HOLDS["corpus"] = "two"
    with pytest.raises(SaveError, match=r"corpus: one; .* two\."):
        grow(config, resume=True)
    HOLDS["corpus"] = "one"
    assert grow(config, resume=True)


def test_the_corpus_is_in_the_manifest(tmp_path):
    assert run_policy(run_of(tmp_path, hosts=1, policy="never"), False, QUIET)
    body = json.loads((tmp_path / runfolder.MANIFEST).read_text())["body"]
    assert {save["facts"]["corpus"] for save in body["generations"]} == {"one"}


# -- esper compare ---------------------------------------------------------------------------------


def comparison(out, **changes):
    values = {
        "task": {"name": "text"},
        "policies": ["never", "heuristic"],
        "static": ["final"],
        "seeds": 1,
    }
    return CompareConfig.of({**values, "threads": 1, "out": str(out), **changes})


def test_all_arms_of_a_comparison_have_the_same_compute(tmp_path):
    """Networks of fixed size train on more, since they pay for their last measurement only."""
    results = comparing.run_compare(comparison(tmp_path), False, QUIET)
    budget = Population(TASKS["text"], [0]).runs[0].clock.budget
    for arm in results["arms"].values():
        assert 0.9 < arm["flops"] / budget <= 1
    sizes = {name: arm["final_params"] for name, arm in results["arms"].items()}
    assert sizes["never"] < sizes["heuristic"]
    assert results["corpus"] == "one"
    HOLDS["corpus"] = "two"
    with pytest.raises(SaveError, match=r"corpus: one; .* two\."):
        comparing.run_compare(comparison(tmp_path), True, QUIET)
    HOLDS["corpus"] = "one"
    again = comparing.run_compare(comparison(tmp_path), True, QUIET)
    assert again["rows"] == results["rows"]


@pytest.mark.parametrize("static", ["final-equal-flops", "final-whole"])
def test_a_comparison_by_compute_has_no_arms_of_other_lengths(static, tmp_path):
    with pytest.raises(SettingError, match=static):
        comparison(tmp_path, static=[static], pretrain=2)


# -- esper ppo -------------------------------------------------------------------------------------


def training(out, **changes):
    task = {"task__name": "text", "task__epochs": None, "task__epoch_examples": None}
    learning = {"ppo__minibatches": 1, "ppo__anneal_decisions": 6}
    return tiny(out, **task, **learning, hosts=1, host_pool=1, **changes)


def test_a_training_by_compute_resumes_to_the_same_policy(tmp_path):
    train(training(tmp_path / "whole"))
    train(training(tmp_path / "cut", rounds=1))
    HOLDS["corpus"] = "two"
    with pytest.raises(SaveError, match=r"corpus: one; .* two\."):
        train(training(tmp_path / "cut"), resume=True)
    HOLDS["corpus"] = "one"
    train(training(tmp_path / "cut"), resume=True)
    tiny_runs.assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_the_reward_of_compute_is_the_lead_in_loss_over_a_twin_of_the_same_compute(tmp_path):
    task = TASKS["text"]
    env = GrowthVectorEnv(
        task, 1, host_seeds=[3], folder=tmp_path, weights=FAMILIES["compute"], data_root=None
    )
    env.reset(seed=0)
    paid = 0.0
    for _ in range(task.epochs - 1):
        _, rewards, terminated, _, info = env.step(np.zeros((1, 4), int))
        paid += rewards[0]
    assert terminated[0]
    lead = (env.twins[3][-1].held_out_loss - env.loss[0]) / env.units[3]
    assert info["reward_parts"][0].keys() == FAMILIES["compute"].keys()
    assert paid == pytest.approx(lead, rel=1e-6), (
        "a host that ends behind its twin earns less than nothing"
    )


@pytest.mark.slow
def test_a_static_network_pays_for_one_measurement_and_is_not_refused_for_its_size(tmp_path):
    asked = {
        "task": {"name": "code_tiny", "compute": 0.1},
        "policies": ["heuristic"],
        "static": ["final"],
    }
    config = CompareConfig.of({**asked, "seeds": 1, "out": str(tmp_path / "run")})
    arms = comparing.run_compare(config, False, Console(quiet=True))["arms"]
    assert arms["final of heuristic"]["final_params"] == arms["heuristic"]["final_params"] > 42_624
    assert arms["final of heuristic"]["flops"] == pytest.approx(
        arms["heuristic"]["flops"], rel=0.05
    )


def test_training_that_nobody_pays_for_is_refused(tmp_path):
    with pytest.raises(SettingError, match="--pretrain"):
        CompareConfig.of({"task": {"name": "code_tiny"}, "pretrain": 2, "out": str(tmp_path)})


def test_a_twin_has_the_same_compute_and_pays_for_its_last_measurement_only(tmp_path, monkeypatch):
    played, task = [], TASKS["text"]
    real = Population.start_epoch
    monkeypatch.setattr(
        Population, "start_epoch", lambda self, **_: (played.append(self), real(self))[1]
    )
    twin_readings(task, [3], tmp_path)
    run = played[-1].runs[0]
    assert run.ledger.phases["validation"].examples == len(run.splits.validation)
    assert 0.9 < run.ledger.flops / run.clock.budget <= 1
    prints = [
        fingerprint(replace(task, **changes), {})
        for changes in ({}, {"compute": 0.6}, {"decay": 0.3})
    ]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("family", ["loss", "contribution"])
def test_clock_compute_has_a_family_of_its_own(family, tmp_path):
    assert (training(tmp_path).family, tiny(tmp_path).family) == ("compute", "contribution")
    with pytest.raises(SettingError, match=f"reward.family is {family}"):
        training(tmp_path, reward__family=family)
    assert tiny(tmp_path, reward__family=family).family == family
