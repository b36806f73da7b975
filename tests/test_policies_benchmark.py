"""benchmarks/policies.py:

the arms made from a policy are what they say, blinding hides what was measured and nothing else,
and keeps and culls are counted against the evidence there was.
"""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, OP_WAIT
from esper.leyline.stages import SeedStage
from esper.runtime.tasks.registry import TASKS
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.masks import MaskSeedInfo, compute_action_masks
from esper.tamiyo.policies import NetworkPolicy
from esper.telemetry.events import ActionTaken, SeedMeasured
from readme_tables import ROOT

MODULES = ("policies_tasks", "policies_arms", "policies_jobs", "policies_report", "policies")
LAYOUT = ObservationLayout(2, 3)
NAMES = LAYOUT.names
PLANT, KEEP, CULL, WAIT = (
    (OP_GERMINATE, 0, 2, 0),
    (OP_FOSSILIZE, 0, 0, 0),
    (OP_CULL, 0, 0, 0),
    (OP_WAIT, 0, 0, 0),
)


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules; the tasks that they register are gone afterwards."""
    before = set(sys.modules)
    tasks = dict(TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    TASKS.clear()
    TASKS.update(tasks)
    here = str(ROOT / "benchmarks")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(here):
            del sys.modules[name]


# -- plans -----------------------------------------------------------------------------------------


def episode(bench, *done):
    return bench.policies_arms.Episode([], list(done))


def test_a_plan_by_decision_is_what_most_hosts_did_then(bench):
    episodes = [
        episode(bench, WAIT, PLANT, KEEP),
        episode(bench, WAIT, PLANT, CULL),
        episode(bench, PLANT, WAIT, CULL),
    ]
    assert bench.policies_arms.by_decision(episodes) == ((1, PLANT), (2, CULL))


def test_a_plan_by_turn_has_the_usual_ops_at_their_usual_times(bench):
    """By decision nothing would be planted here: no two hosts plant at the same time."""
    episodes = [
        episode(bench, PLANT, WAIT, WAIT, KEEP),
        episode(bench, WAIT, PLANT, WAIT, KEEP),
        episode(bench, WAIT, WAIT, PLANT, KEEP),
    ]
    assert bench.policies_arms.by_turn(episodes) == ((1, PLANT), (3, KEEP))
    assert bench.policies_arms.by_decision(episodes) == ((3, KEEP),)


def test_a_plan_by_sequence_is_the_whole_order_that_most_hosts_have(bench):
    episodes = [
        episode(bench, PLANT, CULL, WAIT),
        episode(bench, PLANT, WAIT, KEEP),
        episode(bench, WAIT, PLANT, KEEP),
        episode(bench, WAIT, PLANT, KEEP),
    ]
    assert bench.policies_arms.by_sequence(episodes) == ((1, PLANT), (2, KEEP))


def test_a_replay_waits_until_its_op_is_possible_and_keeps_the_order_of_a_slot(bench):
    replays = bench.policies_arms.Replays(((0, PLANT), (1, KEEP)))
    empty = compute_action_masks({"r0c0": None, "r0c1": None}, 0, None)
    young = compute_action_masks(
        {"r0c0": MaskSeedInfo(SeedStage.BLENDING, 1), "r0c1": None}, 1, None
    )
    measured = compute_action_masks(
        {"r0c0": MaskSeedInfo(SeedStage.PROBATIONARY, 2), "r0c1": None}, 1, None
    )
    assert not young["op"][OP_FOSSILIZE]
    done = []
    memory = {"epoch": 0}
    for masks in (empty, young, measured, measured):
        choice, memory = replays.choose(masks, None, memory, None)
        memory = {**memory, "epoch": memory["epoch"] + 1}
        done.append(choice)
    assert done == [PLANT, WAIT, KEEP, WAIT]


def test_a_replay_does_nothing_before_its_time(bench):
    replays = bench.policies_arms.Replays(((1, PLANT),))
    empty = compute_action_masks({"r0c0": None, "r0c1": None}, 0, None)
    assert replays.choose(empty, None, {"epoch": 0}, None)[0] == WAIT
    assert replays.choose(empty, None, {"epoch": 1}, None)[0] == PLANT


def test_a_replay_does_not_cull_what_it_has_to_keep_first(bench):
    replays = bench.policies_arms.Replays(((0, KEEP), (0, CULL)))
    young = compute_action_masks({"r0c0": MaskSeedInfo(SeedStage.BLENDING, 1)}, 1, None)
    assert young["op"][OP_CULL]
    assert replays.choose(young, None, {"epoch": 0}, None)[0] == WAIT


# -- blinded ---------------------------------------------------------------------------------------


def observation(**changes):
    row = np.zeros(len(NAMES), np.float32)
    for name, value in {"host.share_left": 0.5, "slot0.dormant": 1, **changes}.items():
        row[NAMES.index(name)] = value
    return row


def on_probation(contribution, **changes):
    state = {"slot0.dormant": 0, "slot0.on_probation": 1, "slot0.has_contribution": 1}
    return observation(**{**state, "slot0.contribution": contribution, **changes})


def test_blinding_replaces_measurements_by_the_mean_of_those_that_stood_alike(bench):
    seen = [
        on_probation(value, **{"host.gap": loss})
        for value, loss in ((0.2, 1.0), (0.4, 2.0), (0.6, 3.0))
    ]
    seen += [observation(**{"host.gap": 4.0})]
    means = bench.policies_arms.Means(LAYOUT, seen)
    blinded = means.blind(on_probation(-0.9, **{"host.gap": 9.0}))
    assert blinded[NAMES.index("slot0.contribution")] == pytest.approx(0.4)
    assert blinded[NAMES.index("host.gap")] == pytest.approx(2.5)
    bare = means.blind(observation(**{"host.gap": 9.0}))
    assert bare[NAMES.index("slot0.contribution")] == 0


def test_blinding_hides_every_measurement_and_leaves_what_is_no_secret(bench):
    """Two hosts that stand alike look alike, whatever was measured on them."""
    arms = bench.policies_arms
    measured = {f"slot{slot}.{name}" for slot in range(2) for name in arms.MEASURED_OF_SLOT}
    host = {f"host.{name}" for name in arms.MEASURED_OF_HOST}
    hidden = [NAMES.index(name) for name in (*measured, *host)]
    draw = np.random.default_rng(0)
    seen = draw.normal(size=(20, len(NAMES))).astype(np.float32)
    means = arms.Means(LAYOUT, seen)
    row = draw.normal(size=len(NAMES)).astype(np.float32)
    other = row.copy()
    other[hidden] += 1
    assert np.array_equal(means.blind(row), means.blind(other))
    shown = [index for index in range(len(NAMES)) if index not in hidden]
    assert np.array_equal(means.blind(row)[shown], row[shown])
    assert len(hidden) == 15 + 2 * 4


# -- arms that ask the policy ----------------------------------------------------------------------


class Says:
    """A policy that answers what it is told to, in turn."""

    network = None
    lacking = ()

    def __init__(self, *choices):
        self.choices = list(choices)

    def decide(self, observation, masks, reports, memory, signals=None):
        return np.array([self.choices.pop(0)]), memory


@pytest.fixture
def says(monkeypatch):
    """What a network policy says is what the list holds; its network is never asked."""
    answers = []

    def decide(policy, observation, masks, reports, memory, signals=None):
        return np.array([answers.pop(0)]), memory

    monkeypatch.setattr(NetworkPolicy, "decide", decide)
    monkeypatch.setattr(NetworkPolicy, "__init__", lambda policy, network, lacking: None)
    return answers


def test_keeps_all_waits_where_the_policy_culls_and_has_the_standing_order(bench, says):
    says += [PLANT, CULL, KEEP]
    policy = bench.policies_arms.KeepsAll(Says())
    done = [tuple(policy.decide(None, {}, None, None)[0][0]) for _ in range(3)]
    assert done == [PLANT, WAIT, KEEP]
    assert policy.keeps_measured


def test_a_recorder_asks_its_shadow_the_same_and_notes_where_they_agree(bench, says):
    says += [PLANT, KEEP, CULL, CULL]
    shadow = Says(WAIT, KEEP, KEEP, CULL)
    policy = bench.policies_arms.Recorder(Says(), shadow)
    row = observation()[None]
    done = [tuple(policy.decide(row, {}, None, None)[0][0]) for _ in range(4)]
    assert done == policy.episode.done == [PLANT, KEEP, CULL, CULL]
    assert policy.agreed == [True, False, True]


# -- evidence --------------------------------------------------------------------------------------


def measured(slot, epoch, stage, contribution, error):
    return SeedMeasured(
        host=0,
        epoch=epoch,
        slot=slot,
        stage=stage,
        blueprint="mlp",
        alpha=1.0,
        age=epoch,
        params=1,
        contribution=contribution,
        standard_error=error,
    )


def took(op, slot, epoch):
    return ActionTaken(host=0, epoch=epoch, op=op, slot=slot, blueprint=None, blend=None)


def test_keeps_and_culls_are_counted_against_the_evidence_of_their_epoch(bench):
    events = [
        measured("r0c0", 3, "PROBATIONARY", 0.5, 0.1),
        took("FOSSILIZE", "r0c0", 3),
        measured("r0c1", 3, "PROBATIONARY", 0.05, 0.1),
        took("CULL", "r0c1", 3),
        measured("r0c0", 6, "PROBATIONARY", -0.3, 0.1),
        took("CULL", "r0c0", 6),
        measured("r0c1", 7, "BLENDING", 0.2, 0.1),
        took("CULL", "r0c1", 7),
        measured("r0c1", 9, "PROBATIONARY", -0.05, 0.1),
        took("CULL", "r0c1", 9),
    ]
    decided = bench.policies_jobs.decisions_of(events)
    assert [choice["contribution"] for choice in decided] == [0.5, 0.05, -0.3, None, -0.05]
    row = {"decided": decided, "germinated": 6, "fossilized": 1, "culled": 4}
    found = bench.policies_report.describe_evidence([row])
    one = {"times": 1, "measured": 1, "in_line": 1, "clear": 1, "clear_in_line": 1}
    assert found["FOSSILIZE"] == one
    assert found["CULL"] == {**one, "times": 4, "measured": 3, "in_line": 2}
    assert found["left_undecided"] == 1


def test_arms_are_compared_host_by_host(bench):
    report = bench.policies_report
    costs = dict.fromkeys(report.COSTS, 1)
    arms = {}
    for arm, scores in (("never", (0.1, 0.2)), ("taught", (0.4, 0.3))):
        arms[arm] = [{**dict.fromkeys(report.SCORES, score), **costs} for score in scores]
    described = report.describe_arms(arms)
    assert described["never"]["taught minus"]["test_accuracy"]["mean"] == pytest.approx(0.2)
    assert described["taught"]["minus never"]["test_accuracy"]["mean"] == pytest.approx(0.2)


def test_families_of_rewards_are_compared_training_by_training(bench):
    curves = {
        "contribution": {0: {"lead_curve": [0.0, 0.4, 0.4, 0.4]}, 2: None},
        "lead": {0: {"lead_curve": [0.0, 0.0, 0.1, 0.2]}, 1: None},
    }
    found = bench.policies_report.compare_curves(curves)["contribution minus lead"]
    assert found["seeds"] == [0]
    assert found["all rounds"]["mean"] == pytest.approx(0.225)
    assert found["last rounds"]["mean"] == pytest.approx(0.3)


# -- tasks -----------------------------------------------------------------------------------------


def test_shuffled_branches_differ_by_host_and_a_twin_has_the_same(bench):
    build = bench.policies_tasks.TASKS["shuffled_8"].build_host
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        orders.append(build().order.tolist())
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(8))


def test_host_seeds_that_choose_do_not_judge(bench):
    assert not set(bench.policies_jobs.CHOOSING) & set(bench.policies_jobs.JUDGING)


# -- the whole way ---------------------------------------------------------------------------------


def call(bench, monkeypatch, keep, *arguments):
    given = ["policies.py", "--keep", keep, "--lessons", "blobs", "--seeds", "0", "--hosts", "2"]
    monkeypatch.setattr(sys, "argv", [*map(str, given), *map(str, arguments)])
    bench.policies.main()


def test_a_policy_is_taught_judged_and_reported(bench, monkeypatch, tmp_path, capsys):
    jobs = bench.policies_jobs
    monkeypatch.setattr(jobs, "CHOOSING", range(10, 12))
    few = {"hosts": 2, "host_pool": 2, "task.epochs": 6, "task.epoch_examples": 64}
    monkeypatch.setattr(jobs, "SMALL", {**jobs.SMALL, **few})
    call(bench, monkeypatch, tmp_path, "--rounds", 1, "teach")
    assert "nothing is left" in capsys.readouterr().out
    call(bench, monkeypatch, tmp_path, "judge")
    assert "nothing is left" in capsys.readouterr().out
    out = tmp_path / "policies.json"
    call(bench, monkeypatch, tmp_path, "report", "--out", out)
    found = json.loads(out.read_text())["lessons"]["blobs"]["contribution"]
    arms = found["policies"]["0"]["arms"]
    assert list(arms) == list(jobs.LESSONS["blobs"].arms)
    minus = arms["never"]["taught minus"]["test_accuracy"]["mean"]
    means = [arms[name]["test_accuracy"]["mean"] for name in ("taught", "never")]
    assert minus == pytest.approx(means[0] - means[1])
    assert found["policies"]["0"]["training"]["rounds"] == 1


@pytest.mark.slow
def test_versions_with_equal_actions_train_the_same_networks(tmp_path):
    """The script of benchmarks/decisions.py plays on this version, and its clocks tell apart."""
    out = tmp_path / "decisions.json"
    command = [sys.executable, "benchmarks/decisions.py", "--hosts", "1", "--turns", "2"]
    trees = ["--trees", "one=src", "two=src", "--out", str(out)]
    subprocess.run([*command, *trees], cwd=ROOT, check=True, capture_output=True)
    scripts = json.loads(out.read_text())["scripts"]
    assert scripts["deciding"]["two"]["same_losses"]
    costs = {
        name: versions["two"]["mflops_per_decision"]["counterfactual"]
        for name, versions in scripts.items()
    }
    assert costs["waiting"] > costs["deciding"] > 0
