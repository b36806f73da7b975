"""Training on a task of seconds:

repeatable, counted right, told in full, and stopped in good order.
"""

import statistics
import time
from collections import Counter

import pytest
import torch

from esper.simic import trainer
from esper.simic.environment import GrowthVectorEnv
from esper.simic.ppo.agent import PPOAgent
from esper.simic.ppo.diagnostics import Anomaly, AnomalyDetector
from esper.simic.round_summary import RoundTally
from esper.simic.team import StopVote
from esper.simic.trainer import (
    InterruptedTraining,
    build_agent,
    build_environment,
    build_rollout,
    play_round,
)
from esper.telemetry.escalation import TelemetryLevel
from esper.telemetry.events import (
    SEVERITIES,
    ActionRefused,
    HostRolledBack,
    LedgerClosed,
    from_record,
)
from null_sink import NullSink
from simic.tiny_runs import (
    DECISIONS,
    end_of,
    events_of,
    lines_of,
    open_sink,
    remains_of_round,
    tiny,
    train,
)

DEBUG_TYPES = {"ACTION_TAKEN", "UPDATE_DUMP"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three rounds with every record there is."""
    config = tiny(tmp_path_factory.mktemp("whole") / "run", rounds=3, telemetry__level="debug")
    seen = []
    agent = train(config, watch=seen.append)
    return config, agent, seen


def rounds_of(config):
    return [row for row in lines_of(config.out) if row["type"] == "RoundFinished"]


# -- repeatable ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_twice(whole, tmp_path):
    config, _, _ = whole
    again = config.with_changes([("out", str(tmp_path / "again"))], "the test")
    torch.manual_seed(99)  # a run must not listen to it
    train(again)
    (tensors, plain, events), (tensors2, plain2, events2) = end_of(config.out), end_of(again.out)
    assert all(torch.equal(tensors[name], tensors2[name]) for name in tensors)
    assert (plain, events) == (plain2, events2)


def test_another_seed_gives_another_run(whole, tmp_path):
    config, agent, _ = whole
    other = train(config.with_changes([("out", str(tmp_path / "other")), ("seed", 5)], "the test"))
    assert events_of(config.out) != events_of(tmp_path / "other")
    pairs = zip(agent.network.parameters(), other.network.parameters(), strict=True)
    assert not any(torch.equal(one, two) and one.abs().sum() > 0 for one, two in pairs)


def test_training_leaves_the_global_random_numbers_and_the_settings_of_torch_alone(tmp_path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(tiny(tmp_path / "run", rounds=1, deterministic=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (
        threads,
        False,
    )


def test_every_round_has_other_hosts_in_turn(whole):
    config, _, _ = whole
    env = build_environment(config)
    agent, _ = build_agent(config, env)
    rollout, episodes = build_rollout(env, agent), {}
    for number in (2, 0, 1):  # whatever was played before
        play_round(env, agent, rollout, number, NullSink(), StopVote(agent.team))
        episodes[number] = [run.seed for run in env.population.runs]
    assert Counter(episodes[0] + episodes[1] + episodes[2]) == dict.fromkeys(env.host_seeds, 2)
    play_round(env, agent, rollout, 0, NullSink(), StopVote(agent.team))
    assert [run.seed for run in env.population.runs] == episodes[0]


# -- counted right ---------------------------------------------------------------------------------


def test_one_round_is_one_update_and_every_decision_counts(whole):
    config, agent, seen = whole
    assert (agent.updates, agent.decisions) == (3, 3 * DECISIONS)
    assert [event.decisions for event in seen] == [DECISIONS, 2 * DECISIONS, 3 * DECISIONS]
    assert [event.round for event in seen] == [0, 1, 2]
    assert [sum(event.ops.values()) for event in seen] == [DECISIONS] * 3
    assert [row["update"]["decisions"] for row in rounds_of(config)] == [
        event.decisions for event in seen
    ]


def test_who_watches_is_shown_what_is_written(whole):
    config, _, seen = whole
    assert [from_record(row) for row in rounds_of(config)] == seen


@pytest.mark.parametrize("number", range(3))
def test_a_round_is_what_its_records_add_up_to(whole, number):
    config, _, seen = whole
    event = seen[number]
    epochs = [row for row in events_of(config.out, "HostEpoch") if row["round"] == number]
    first, epochs = epochs[:2], epochs[2:]
    assert [(row["epoch"], row["reward"]) for row in first] == [
        (1, None)
    ] * 2  # nothing was decided before
    last = list({row["host"]: row for row in epochs}.values())
    host_params = build_environment(config).population.runs[0].model.host_params
    assert len(epochs) == DECISIONS
    assert event.mean_return == pytest.approx(sum(row["reward"] for row in epochs) / 2)
    ends = {row["host"]: row for row in [*last, *remains_of_round(config, number)]}
    assert event.accuracy == pytest.approx(
        statistics.fmean(row["held_out_accuracy"] for row in ends.values())
    )
    twins = [row["twin_accuracy"] for row in last]
    assert event.twin_accuracy == pytest.approx(statistics.fmean(twins))
    shares = [row["params"] / host_params for row in last]
    assert event.params_share == pytest.approx(statistics.fmean(shares))
    for name, value in event.reward_parts.items():
        assert value == pytest.approx(
            sum(row["reward_parts"][name] for row in epochs) / 2, abs=1e-12
        )
    actions = [row for row in events_of(config.out, "ACTION_TAKEN") if row["round"] == number]
    assert {name: count for name, count in event.ops.items() if count} == Counter(
        row["op"] for row in actions
    )


@pytest.mark.parametrize("number", range(3))
def test_stages_of_a_round_are_counted_from_its_changes(whole, number):
    config, _, seen = whole
    found, place, event = Counter(), 0, seen[number]
    for row in events_of(config.out):
        found[row.get("after")] += row["type"] == "StageChanged" and place == number
        place += row["type"] == "RoundFinished"
    assert (event.germinated, event.fossilized, event.culled) == tuple(
        found[stage] for stage in ("GERMINATED", "FOSSILIZED", "CULLED")
    )


def test_there_was_something_to_count(whole):
    _, _, seen = whole
    assert sum(event.germinated for event in seen) > 2
    assert sum(event.culled + event.fossilized for event in seen) > 0


def test_reward_parts_add_up_to_the_reward_and_to_the_mean_return(whole):
    config, _, seen = whole
    for row in events_of(config.out, "HostEpoch"):
        if row["epoch"] == 1:
            continue
        assert sum(row["reward_parts"].values()) == pytest.approx(row["reward"], abs=1e-12)
    for event in seen:
        assert sum(event.reward_parts.values()) == pytest.approx(event.mean_return, abs=1e-12)
        assert list(event.reward_parts) == [
            "contribution:r0c0",
            "contribution:r0c1",
            "harm",
            "rent",
            "churn",
            "breakdown",
        ]


def test_a_decision_is_recorded_twice_at_the_same_epoch(whole):
    """ActionTaken in words for what changed something, ACTION_TAKEN for every decision."""
    config, _, _ = whole
    taken = [(row["host"], row["epoch"], row["op"]) for row in events_of(config.out, "ActionTaken")]
    told = [
        (row["env_id"], row["inner_epoch"], row["op"])
        for row in events_of(config.out, "ACTION_TAKEN")
    ]
    assert taken == [row for row in told if row[2] != "WAIT"]
    assert {epoch for _, epoch, _ in told} == {1, 2, 3}


def test_heads_that_an_op_does_not_use_are_recorded_as_masked(whole):
    config, _, _ = whole
    rows = events_of(config.out, "ACTION_TAKEN")
    assert all(row["slot_masked"] for row in rows if row["op"] == "WAIT")
    assert all(
        row["blueprint_masked"] and row["blend_masked"] for row in rows if row["op"] != "GERMINATE"
    )
    assert not all(row["blueprint_masked"] for row in rows if row["op"] == "GERMINATE")
    assert all(row["action_success"] for row in rows)


# -- learning --------------------------------------------------------------------------------------


def test_bonus_and_rate_fall_by_decisions_to_the_end_of_the_run(whole):
    config, _, seen = whole
    ppo = config.ppo.annealed_over(3 * DECISIONS)
    for number, event in enumerate(seen):
        made = number * DECISIONS
        assert event.update["entropy_weight"] == ppo.annealed("entropy", made)
        assert event.update["lr"] == ppo.annealed("lr", made)


def test_the_statistics_take_in_every_round_once(whole, monkeypatch, tmp_path):
    _, agent, _ = whole
    assert (
        float(agent.network.observation_stats.count)
        == float(agent.network.return_stats.count)
        == 3 * DECISIONS
    )
    calls = []
    stats = type(agent.network.observation_stats)
    real = stats.update
    monkeypatch.setattr(
        stats, "update", lambda self, rows, pool: (calls.append(len(rows)), real(self, rows, pool))
    )
    train(tiny(tmp_path / "run"))
    assert calls == [DECISIONS] * 2  # the observations of each of two rounds


def test_a_host_that_is_given_up_decides_no_more_in_its_round(tmp_path, monkeypatch):
    steps, real = [], GrowthVectorEnv.step_wait

    def step(self):
        obs, rewards, terminated, truncated, info = real(self)
        steps.append(len(steps))
        if len(steps) == 1:
            terminated[0] = self.is_over[0] = True
            rewards[0] = -1.0
        return obs, rewards, terminated, truncated, info

    monkeypatch.setattr(GrowthVectorEnv, "step_wait", step)
    config = tiny(tmp_path / "run", rounds=1, telemetry__level="debug")
    agent = train(config)
    assert agent.decisions == 1 + 3
    (event,) = rounds_of(config)
    assert sum(event["ops"].values()) == 4
    assert Counter(row["env_id"] for row in events_of(config.out, "ACTION_TAKEN")) == {0: 1, 1: 3}
    assert [row["epoch"] for row in events_of(config.out, "HostEpoch") if row["host"] == 0] == [
        1,
        2,
    ]


def test_rollbacks_and_refusals_are_told_and_counted(tmp_path, monkeypatch):
    real, happened = (
        GrowthVectorEnv.step_wait,
        [HostRolledBack(1, 2, "loss is nan"), ActionRefused(1, 2, "CULL", "r0c0", "no")],
    )

    def step(self):
        result = real(self)
        result[4]["events"][1] += happened
        happened.clear()
        return result

    told = list(happened)
    monkeypatch.setattr(GrowthVectorEnv, "step_wait", step)
    config = tiny(tmp_path / "run", rounds=1, telemetry__level="debug")
    train(config)
    assert [
        from_record(row) for row in events_of(config.out, "HostRolledBack", "ActionRefused")
    ] == told
    assert rounds_of(config)[0]["refused"] == 1
    failed = [row for row in events_of(config.out, "ACTION_TAKEN") if not row["action_success"]]
    assert [(row["env_id"], row["inner_epoch"]) for row in failed] == [(1, 1)]


def test_the_policy_sees_and_stores_what_the_hosts_are_in(tmp_path):
    config = tiny(tmp_path / "run")
    env = build_environment(config)
    agent, _ = build_agent(config, env)
    rollout = build_rollout(env, agent)
    play_round(env, agent, rollout, 0, NullSink(), StopVote(agent.team))
    assert rollout.states.shape == (3, 2, env.layout.width)
    assert rollout.valid.all()
    assert rollout.terminated.tolist() == [[False, False], [False, False], [True, True]]
    assert not rollout.truncated.any()
    left = env.layout.names.index("host.share_left")
    assert rollout.states[:, 0, left].tolist() == pytest.approx([0.75, 0.5, 0.25])
    for name, mask in rollout.masks.items():
        assert mask.any(-1).all(), name


# -- telemetry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["off", "minimal", "normal", "debug"])
def test_a_level_lets_through_its_own_and_all_lower_records(level, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(AnomalyDetector, "check", lambda *_: [])  # an anomaly would lift the level
    config = whole[0].with_changes(
        [("out", str(tmp_path / "run")), ("telemetry.level", level)], "the test"
    )
    train(config)
    severities = {
        cls.__name__: severity for cls, severity in SEVERITIES.items() if cls is not LedgerClosed
    }

    def severity(row):
        is_debug = row["type"] in DEBUG_TYPES
        return (
            TelemetryLevel.DEBUG if is_debug else severities.get(row["type"], TelemetryLevel.NORMAL)
        )

    def kept(rows):
        return [row for row in rows if severity(row) <= TelemetryLevel[level.upper()]]

    every = [
        row
        for row in kept(events_of(whole[0].out))
        if row["type"] not in ("AnomalyFound", "UPDATE_DUMP")
    ]
    assert events_of(config.out) == every
    assert {row["type"] for row in every} >= {
        "off": set(),
        "minimal": {"RoundFinished", "CheckpointSaved"},
    }.get(level, {"HostEpoch", "ActionTaken", "StageChanged", "GateJudged"})


class FindsAtRounds:
    """A detector that names an anomaly in some rounds and nothing in others."""

    def __init__(self, rounds, total):
        self.progress = {number / total for number in rounds}

    def __call__(self):
        return self

    def check(self, record, progress):
        return [Anomaly("ratio", float("inf"), 5.0, "host 0")] if progress in self.progress else []


def with_anomalies(tmp_path, monkeypatch, where, **changes):
    config = tiny(tmp_path / "run", **{"rounds": 6, **changes})
    monkeypatch.setattr(trainer, "AnomalyDetector", FindsAtRounds(where, config.rounds))
    train(config)
    return config


def test_an_anomaly_brings_debug_records_for_a_few_rounds_and_then_they_end(tmp_path, monkeypatch):
    config = with_anomalies(tmp_path, monkeypatch, [1], telemetry__escalation_rounds=3)
    (anomaly,) = events_of(config.out, "AnomalyFound")
    assert anomaly == {
        "type": "AnomalyFound",
        "round": 1,
        "kind": "ratio",
        "value": None,
        "limit": 5.0,
        "where": "host 0",
        "escalated": True,
    }
    assert {row["round"] for row in events_of(config.out, "ACTION_TAKEN")} == {2, 3}
    (dump,) = events_of(config.out, "UPDATE_DUMP")
    finished = events_of(config.out, "RoundFinished")[1]
    assert {key: value for key, value in dump.items() if key not in ("type", "round")} == finished[
        "update"
    ]


def test_a_fault_that_stays_is_told_every_round_and_shown_in_full_once(tmp_path, monkeypatch):
    config = with_anomalies(tmp_path, monkeypatch, range(6), telemetry__escalation_rounds=2)
    assert [row["escalated"] for row in events_of(config.out, "AnomalyFound")] == [
        True,
        *[False] * 5,
    ]
    assert {row["round"] for row in events_of(config.out, "ACTION_TAKEN")} == {1}
    assert len(events_of(config.out, "UPDATE_DUMP")) == 1


def test_nothing_is_escalated_where_telemetry_is_off(tmp_path, monkeypatch):
    config = with_anomalies(tmp_path, monkeypatch, [0], telemetry__level="off", rounds=2)
    assert lines_of(config.out) == []


def test_a_row_that_is_not_a_number_is_told_and_does_no_harm(tmp_path, monkeypatch):
    real = PPOAgent.update

    def update(self, rollout, **options):
        rollout.rewards[1, 0] = float("nan") if self.updates == 0 else rollout.rewards[1, 0]
        return real(self, rollout, **options)

    monkeypatch.setattr(PPOAgent, "update", update)
    config = tiny(tmp_path / "run")
    agent = train(config)
    assert all(torch.isfinite(value).all() for value in agent.network.state_dict().values())
    found = events_of(config.out, "AnomalyFound")
    assert (found[0]["round"], found[0]["kind"], found[0]["escalated"]) == (
        0,
        "non-finite numbers",
        True,
    )
    assert {row["round"] for row in events_of(config.out, "ACTION_TAKEN")} == {1}


def test_telemetry_costs_under_three_percent_of_an_epoch(tmp_path, monkeypatch):
    """Processor time of counting and writing at `normal`, of the whole time of playing; digits as
    in its preset.
    """
    task = {
        "task__name": "digits",
        "task__epoch_examples": 512,
        "task__epochs": 3,
        "hosts": 4,
        "host_pool": 1,
    }
    spent, real = [], RoundTally.take

    def take(self, *args):
        started = time.process_time()
        real(self, *args)
        spent.append(time.process_time() - started)

    monkeypatch.setattr(RoundTally, "take", take)
    config = tiny(tmp_path / "run", **task)
    env = build_environment(config)
    agent, _ = build_agent(config, env)
    rollout = build_rollout(env, agent)
    shares = []
    with open_sink(config) as sink:
        for number in range(3):
            spent.clear()
            started = time.process_time()
            play_round(env, agent, rollout, number, sink, StopVote(agent.team))
            before = time.process_time()
            sink.commit()
            spent.append(time.process_time() - before)
            shares.append(sum(spent) / (time.process_time() - started))
    print(f"telemetry at normal: {min(shares):.3%} to {max(shares):.3%} of an epoch")
    assert statistics.median(shares) < 0.03


# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "rounds", "epochs"),
    [(-3, 0, 0), (0, 0, 0), (1, 0, 1), (3, 0, 3), (4, 1, 4), (8, 2, 8)],
)
def test_who_asks_to_stop_waits_one_epoch_and_is_told_what_is_saved(
    tmp_path, asked, rounds, epochs, monkeypatch
):
    asks, steps, real = [], [], GrowthVectorEnv.step_async
    monkeypatch.setattr(
        GrowthVectorEnv, "step_async", lambda env, choices: (steps.append(None), real(env, choices))
    )

    config = tiny(tmp_path / "run", rounds=3)

    def should_stop():
        asks.append(None)
        return len(asks) == config.task.epochs + asked  # twins are played first

    with pytest.raises(InterruptedTraining, match=f"{rounds} whole rounds") as stop:
        train(config, should_stop=should_stop)
    assert (stop.value.rounds, len(steps)) == (rounds, epochs)
    assert len(events_of(config.out, "RoundFinished")) == rounds
    assert (config.out / "manifest.json").exists() == (rounds > 0)


def test_a_run_that_has_all_its_rounds_does_nothing_more(whole, tmp_path):
    config, _, _ = whole
    before = events_of(config.out)
    seen = []
    agent = train(config, resume=True, watch=seen.append)
    assert (seen, agent.updates, events_of(config.out)) == ([], 3, before)


def test_the_policy_runs_where_it_is_told_to(tmp_path, monkeypatch):
    config = tiny(tmp_path)
    env = build_environment(config)
    monkeypatch.setattr(
        trainer, "parse_devices", lambda names: [torch.device("meta" if names == ["x"] else "cpu")]
    )
    monkeypatch.setattr(trainer, "PPOAgent", lambda network, *args, **options: network)
    network, _ = build_agent(config.model_copy(update={"policy_device": "x"}), env)
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
