"""Anomalies name what is wrong and where, and one bad row gives exactly one escalation."""

import math
from dataclasses import replace

import pytest
import torch

from esper.leyline.factored_actions import OP_GERMINATE
from esper.simic.ppo.diagnostics import Anomaly, AnomalyDetector, RatioExplosionDiagnostic
from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from simic.worlds import SMALL, growth_agent, growth_rollout

NAMES = ("op", "slot")
DETECTOR = AnomalyDetector()


@pytest.fixture(scope="module")
def healthy():
    agent = growth_agent()
    record = agent.update(growth_rollout(agent))
    return replace(record, explained_variance=0.9)


def kinds(record, progress=1.0, detector=DETECTOR):
    return [anomaly.kind for anomaly in detector.check(record, progress)]


# -- limits ----------------------------------------------------------------------------------------


def test_a_healthy_update_has_no_anomaly(healthy):
    assert DETECTOR.check(healthy, 1.0) == []


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"ratio_max": 5.1}, "ratio"),
        ({"ratio_min": 0.19}, "ratio"),
        ({"ratio_min": 0.0}, "ratio"),
        ({"approx_kl": 0.21}, "kl"),
        ({"first_ratio_gap": {"op": 0.0, "joint": 0.00011}}, "first ratio gap"),
        ({"explained_variance": -0.01}, "explained variance"),
        ({"skipped_steps": 1}, "non-finite numbers"),
        ({"policy_loss": math.nan}, "non-finite numbers"),
        ({"value_loss": math.inf}, "non-finite numbers"),
        ({"ratio_max": math.nan}, "non-finite numbers"),
    ],
    ids=str,
)
def test_each_limit_has_its_own_anomaly(healthy, changes, kind):
    assert kinds(replace(healthy, **changes)) == [kind]


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio_max": 5.0, "ratio_min": 0.2},
        {"approx_kl": 0.2},
        {"first_ratio_gap": {"op": 1e-4, "joint": 1e-4}},
        {"explained_variance": 0.0},
        {"explained_variance": math.nan},
    ],
    ids=str,
)
def test_at_its_limit_an_update_is_still_healthy(healthy, changes):
    assert kinds(replace(healthy, **changes)) == []


def test_a_first_head_without_doubt_is_an_anomaly_and_a_later_one_is_not(healthy):
    def sure(name):
        return replace(
            healthy, heads={**healthy.heads, name: replace(healthy.heads[name], entropy=0.005)}
        )

    (anomaly,) = DETECTOR.check(sure("op"), 1.0)
    assert anomaly == Anomaly("entropy", 0.005, 0.01, "head op")
    assert kinds(sure("blend")) == []


@pytest.mark.parametrize(
    ("progress", "variance", "is_odd"),
    [
        (0.0, -99.0, False),
        (0.24, -99.0, False),
        (0.25, -0.51, True),
        (0.25, -0.49, False),
        (0.5, -0.1, True),
    ],
)
def test_the_value_has_to_know_more_as_training_goes_on(healthy, progress, variance, is_odd):
    record = replace(healthy, explained_variance=variance)
    assert kinds(record, progress) == ["explained variance"] * is_odd


def test_limits_are_settings(healthy):
    assert kinds(replace(healthy, ratio_max=5.1), detector=AnomalyDetector(ratio_max=6.0)) == []


# -- the worst ratios ------------------------------------------------------------------------------


def found(changes, hosts=(4, 7, 9), begins=(0, 0, 0), **settings):
    """What is found in ratios [2 heads, 3 rows, 5 steps] that are 1 but for `changes`."""
    log_ratios = torch.zeros(2, len(hosts), 5)
    for place, ratio in changes.items():
        log_ratios[place] = math.log(ratio) if ratio > 0 else math.nan
    return RatioExplosionDiagnostic.of(
        log_ratios, torch.tensor(hosts), torch.tensor(begins), NAMES, **settings
    )


def places(diagnostic):
    return [(worst.host, worst.epoch, worst.head) for worst in diagnostic.worst]


def test_the_worst_are_named_by_host_epoch_and_head_the_worst_first():
    diagnostic = found({(0, 0, 3): 3.0, (1, 2, 1): 0.1, (0, 1, 4): 1.9})
    assert places(diagnostic) == [(9, 2, "slot"), (4, 4, "op")]
    assert [worst.ratio for worst in diagnostic.worst] == pytest.approx([0.1, 3.0])
    assert diagnostic.count == 2
    assert str(diagnostic.worst[0]) == "host 9, epoch 2, head slot: ratio 0.1"


def test_nothing_is_named_where_nothing_is_wrong():
    assert found({(0, 0, 0): 1.9, (0, 1, 0): 0.6}) == RatioExplosionDiagnostic((), 0)


def test_what_is_not_a_number_is_worst_of_all():
    assert places(found({(0, 0, 3): 1e30, (1, 1, 1): -1}))[0] == (7, 2, "slot")


def test_a_decision_that_is_far_off_only_as_a_whole_is_named_by_the_head_that_moved_most():
    assert places(found({(0, 2, 2): 1.4, (1, 2, 2): 1.6})) == [(9, 3, "slot")]


def test_a_choice_that_is_off_in_every_pass_is_named_once_at_its_worst():
    diagnostic = found(
        {(0, 0, 3): 3.0, (0, 1, 3): 5.0, (0, 2, 3): 4.0, (1, 0, 0): 2.5}, hosts=(4, 4, 4)
    )
    assert places(diagnostic) == [(4, 4, "op"), (4, 1, "slot")]
    assert diagnostic.worst[0].ratio == pytest.approx(5.0)
    assert diagnostic.count == 4


def test_only_so_many_are_named():
    every = {
        (head, row, step): 3.0 + row for head in range(2) for row in range(3) for step in range(5)
    }
    assert len(found(every).worst) == 5
    assert len(found(every, top=2).worst) == 2
    assert found(every, top=2).count == 30


def test_records_stay_finite_however_far_a_probability_moved():
    agent = growth_agent(SMALL.model_copy(update={"minibatches": 1}))
    rollout = growth_rollout(agent)
    rollout.log_probs[3, 2, 0] = -500.0
    record = agent.update(rollout)
    assert math.isfinite(record.ratio_max)
    assert math.isfinite(record.explosion.worst[0].ratio)
    assert "non-finite numbers" in kinds(record)  # the divergence is infinite, so no step was taken
    assert (record.steps, record.early_stop_epoch) == (0, 0)


# -- from a bad row to debug records ---------------------------------------------------------------


def run_rounds(rounds, bad_rounds, bad=(5, 2, 0), shift=3.0):
    """Rollout, update, check, escalate, round after round; the log-probability at `bad` is off in
    `bad_rounds`.
    """
    agent, telemetry = growth_agent(), TelemetryConfig(escalation_rounds=3)
    begun, levels, wheres = [], [], []
    for number in range(rounds):
        rollout = growth_rollout(agent, seed=number)
        if number in bad_rounds:
            rollout.log_probs[bad] -= shift
        for anomaly in DETECTOR.check(agent.update(rollout), 0.0):
            wheres.append(anomaly.where)
            if telemetry.escalate_temporarily():
                begun.append(number)
        levels.append(telemetry.level)
        telemetry.end_round()
    return begun, levels, wheres


@pytest.mark.parametrize("bad", [(5, 2, 0), (0, 0, 0), (7, 3, 0)], ids=str)
def test_one_bad_row_gives_exactly_one_escalation_that_names_it(bad):
    begun, levels, wheres = run_rounds(7, [1], bad)
    step, host, _ = bad
    assert begun == [1]
    assert (
        levels == [TelemetryLevel.NORMAL] + [TelemetryLevel.DEBUG] * 3 + [TelemetryLevel.NORMAL] * 3
    )
    assert wheres
    assert all(
        where.startswith(f"host {host}, epoch {step + 1}, head op: ratio ") for where in wheres
    )


@pytest.mark.parametrize("head", range(4))
def test_the_anomaly_names_the_head_whose_probability_is_off(head):
    agent = growth_agent()
    rollout = growth_rollout(agent)
    # germinating uses every head
    step, host = (rollout.choices[..., 0] == OP_GERMINATE).nonzero()[0].tolist()
    rollout.log_probs[step, host, head] -= 3.0
    anomalies = DETECTOR.check(agent.update(rollout), 0.0)
    assert "ratio" in [anomaly.kind for anomaly in anomalies]
    name = agent.network.spec.names[head]
    assert all(
        anomaly.where.startswith(f"host {host}, epoch {step + 1}, head {name}: ratio ")
        for anomaly in anomalies
    )


def test_a_row_that_stays_bad_is_shown_in_full_once_and_again_after_a_good_round():
    begun, levels, wheres = run_rounds(10, [0, 1, 2, 3, 4, 6])
    assert begun == [0, 6]
    debug = [number for number, level in enumerate(levels) if level is TelemetryLevel.DEBUG]
    assert debug == [0, 1, 2, 6, 7, 8]
    assert len(wheres) >= 6


def test_good_rows_give_no_escalation():
    assert run_rounds(4, [])[0] == []
