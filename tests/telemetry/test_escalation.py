"""An anomaly lifts the level for a few rounds, once per series of anomalies, and then it is back
where it was.
"""

import json

import pytest

from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel

NORMAL, DEBUG = TelemetryLevel.NORMAL, TelemetryLevel.DEBUG


def lived(config, has_anomaly):
    """The level in effect at the end of each round, and what each anomaly was answered."""
    levels, answers = [], []
    for anomaly in has_anomaly:
        answers.append(config.escalate_temporarily() if anomaly else None)
        levels.append(config.level)
        config.end_round()
    return levels, answers


def test_without_an_anomaly_the_level_is_the_one_that_was_set():
    config = TelemetryConfig("minimal")
    assert config.level is TelemetryLevel.MINIMAL
    config.end_round()
    assert config.level is TelemetryLevel.MINIMAL


def test_levels_are_in_order_so_that_a_recorder_can_compare():
    assert (
        TelemetryLevel.OFF < TelemetryLevel.MINIMAL < TelemetryLevel.NORMAL < TelemetryLevel.DEBUG
    )


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_an_escalation_lasts_for_its_rounds_and_then_the_level_is_back(rounds):
    levels, answers = lived(TelemetryConfig(escalation_rounds=rounds), [True] + [False] * 6)
    assert levels == [DEBUG] * rounds + [NORMAL] * (7 - rounds)
    assert answers == [True] + [None] * 6


def test_it_is_three_rounds_unless_told_otherwise():
    assert lived(TelemetryConfig(), [True] + [False] * 4)[0] == [DEBUG] * 3 + [NORMAL] * 2


def test_further_anomalies_neither_restart_nor_lengthen_an_escalation():
    levels, answers = lived(TelemetryConfig(), [True, True, True, False, False])
    assert levels == [DEBUG] * 3 + [NORMAL] * 2
    assert answers == [True, False, False, None, None]


def test_two_anomalies_of_one_round_are_one_escalation():
    config = TelemetryConfig()
    assert [config.escalate_temporarily() for _ in range(3)] == [True, False, False]
    for _ in range(3):
        config.end_round()
    assert config.level is NORMAL


def test_a_fault_that_stays_is_shown_in_full_once():
    levels, answers = lived(TelemetryConfig(), [True] * 20)
    assert levels == [DEBUG] * 3 + [NORMAL] * 17
    assert sum(answers) == 1


def test_an_anomaly_after_a_quiet_round_is_a_new_one():
    levels, answers = lived(
        TelemetryConfig(escalation_rounds=2), [True, True, True, False, True, False, False]
    )
    assert levels == [DEBUG, DEBUG, NORMAL, NORMAL, DEBUG, DEBUG, NORMAL]
    assert answers == [True, False, False, None, True, None, None]


@pytest.mark.parametrize("level", ["off", "debug"])
def test_off_stays_off_and_debug_has_nothing_to_gain(level):
    config = TelemetryConfig(level)
    assert not config.escalate_temporarily()
    assert config.level is TelemetryLevel[level.upper()]


@pytest.mark.parametrize("level", ["debug", "DEBUG", DEBUG])
def test_a_level_is_read_by_name_or_member(level):
    assert TelemetryConfig(level).level is DEBUG


def test_a_saved_escalation_goes_on_where_it_was():
    for rounds_before in range(6):
        one, other = TelemetryConfig(), TelemetryConfig()
        lived(one, [True, True, False, False, True][:rounds_before])
        other.load(json.loads(json.dumps(one.state())))
        rest = [True, False, True, True, False, True]
        assert lived(other, rest) == lived(one, rest)
