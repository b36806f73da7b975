"""What an episode of `esper ppo` costs:

the policy's part is counted, and every ledger is closed once.
"""

import pytest

from esper.simic.environment import MAX_ROLLBACKS, GrowthVectorEnv
from simic.tiny_runs import events_of, lines_of, tiny, train

STEPS = 3
"""decisions of an episode of four epochs"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("ledgers") / "run", rounds=2)
    return train(config), lines_of(config.out)


def ledgers_by_round(rows):
    found, number = {}, None
    for row in rows:
        number = row["round"] if row["type"] == "RoundBegan" else number
        if row["type"] == "LedgerClosed":
            found.setdefault(number, []).append(row)
    return found


def test_every_episode_closes_its_ledger(trained):
    _, rows = trained
    closed = ledgers_by_round(rows)
    assert {number: [row["host"] for row in own] for number, own in closed.items()} == {
        0: [0, 1],
        1: [0, 1],
    }
    spent = {}
    for row in rows:
        if row["type"] in ("HostEpoch", "RemainsMeasured"):
            spent[row["host"]] = row["flops"]
        if row["type"] == "LedgerClosed":
            assert sum(row["flops"].values()) == spent[row["host"]]
    assert any(row["type"] == "RemainsMeasured" for row in rows)


def test_every_decision_of_the_policy_is_charged_to_its_host(trained):
    agent, rows = trained
    each = agent.network.decision_flops
    for row in (row for own in ledgers_by_round(rows).values() for row in own):
        assert row["examples"]["policy"] == STEPS
        assert row["flops"]["policy"] == STEPS * each
        assert row["seconds"]["policy"] > 0


def test_the_seconds_of_choosing_are_shared_among_the_hosts(tmp_path, monkeypatch):
    charged, real = [], GrowthVectorEnv.step_async

    def step(env, actions):
        charged.append([run.ledger.phases["policy"].seconds for run in env.population.runs])
        return real(env, actions)

    monkeypatch.setattr(GrowthVectorEnv, "step_async", step)
    train(tiny(tmp_path / "run", rounds=1))
    assert all(first == second > 0 for first, second in charged)
    assert [row[0] for row in charged] == sorted(row[0] for row in charged)


def test_a_host_that_is_given_up_closes_its_ledger_there_and_no_second_time(tmp_path, monkeypatch):
    steps, real = [], GrowthVectorEnv.step_async

    def step(env, actions):
        steps.append(None)
        if len(steps) == 1:
            env.population.governors[1].rollbacks = MAX_ROLLBACKS
        return real(env, actions)

    monkeypatch.setattr(GrowthVectorEnv, "step_async", step)
    config = tiny(tmp_path / "run", rounds=1)
    train(config)
    closed = events_of(config.out, "LedgerClosed")
    assert [(row["host"], row["examples"]["policy"]) for row in closed] == [(1, 1), (0, STEPS)]


@pytest.mark.parametrize(("level", "count"), [("minimal", 0), ("normal", 2)])
def test_ledgers_are_kept_from_normal_on(level, count, tmp_path):
    config = tiny(tmp_path / "run", rounds=1, telemetry__level=level)
    train(config)
    assert len(events_of(config.out, "LedgerClosed")) == count
