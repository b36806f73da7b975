"""`esper compare`:

paired arms that do not know of each other, rates chosen by validation, stopped and gone on.
"""

import json
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from esper.leyline.errors import CheckpointMismatchError, SaveError
from esper.runtime.host import HostRun
from esper.runtime.tasks.registry import get_task
from esper.storage.runfolder import ARMS
from esper.tamiyo.policies import NetworkPolicy
from esper.tamiyo.policy_files import read as read_policy
from esper.tamiyo.policy_files import seal
from esper.telemetry.events import HostEpoch, to_record
from esper.trials import arms, comparison
from esper.trials.arms import Stopped
from esper.trials.comparison import Comparison
from esper.trials.config import CompareConfig
from esper.trials.results import Trials
from trials import grown_runs
from trials.grown_runs import asked_at, changed, grow
from trials.test_arms import same
from trials.test_running import trained

TINY = {
    "task": {"name": "blobs", "epochs": 8, "epoch_examples": 96, "held_out": 64},
    "seeds": 3,
    "threads": 1,
}
POLICIES = ("never", "sham", "random", "heuristic")
STATIC = ("start", "final", "final-equal-flops")
STATIC_ARMS = ("start", "final of heuristic", "final-equal-flops of heuristic")
LR = get_task("blobs").lr


def configured(out, **changes):
    """A small comparison, changed; keys of the task have `task__` in front."""
    return CompareConfig.of(changed(TINY, out, changes))


def compare(config, should_stop=lambda: False, most=None):
    """Every arm's trials, by arm and rate; `most` hosts train side by side, as many as on a GPU."""
    config.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(config, lambda line: None, should_stop)
    comparison.most_hosts = most or comparison.most_hosts
    return comparison.run()


def timeless(trials):
    """All that is kept of an arm but the wall clock; hosts are numbered by their place in a
    population, so not that.
    """
    events = [[{**event, "host": 0} for event in own] for own in trials.events]
    return [{**row.model_dump(), "seconds": 0} for row in trials.rows], trials.architectures, events


def all_timeless(done):
    return {key: timeless(trials) for key, trials in done.items()}


@contextmanager
def logged():
    """What is lived meanwhile:

    each episode's data order and learning rates, what it leaves, who trains beside it.
    """
    log = SimpleNamespace(epochs={}, left={}, sizes=[], ledgers={})
    prepare, begin, live = arms.prepare_host, HostRun.begin_epoch, comparison.run_entries

    def prepared(population, host, entry):
        prepare(population, host, entry)
        run, key = population.runs[host], (entry.arm, population.task.lr, entry.seed)
        run.log = log.epochs[key] = []
        log.ledgers[key] = run.ledger

    def begun(run):
        begin(run)
        if hasattr(run, "log"):
            run.log.append(
                (run.plan.rows.tolist(), run.optimizer.param_groups[run.link.home]["lr"])
            )

    def lived(task, entries, populate, **options):
        log.sizes.append(len(entries))
        runs = live(task, entries, populate, **options)
        log.left |= {
            (entry.arm, task.lr, entry.seed): run for entry, run in zip(entries, runs, strict=True)
        }
        return runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arms, "prepare_host", prepared)
        patch.setattr(HostRun, "begin_epoch", begun)
        patch.setattr(comparison, "run_entries", lived)
        yield log


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A policy that plants much."""
    return str(trained(tmp_path_factory.mktemp("ppo"), initial_wait=0.2, seed=2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison that nobody disturbed."""
    config = configured(
        tmp_path_factory.mktemp("whole"), policies=POLICIES, static=STATIC, final_of=["heuristic"]
    )
    with logged() as log:
        done = compare(config)
    return SimpleNamespace(config=config, done=done, log=log)


def test_whoever_plays_other_episodes_than_a_policy_was_trained_for_is_told(checkpoint, tmp_path):
    own = read_policy(Path(checkpoint))[1]["facts"]["task"]
    alike = {f"task__{key}": own[key] for key in ("epochs", "epoch_examples", "batch", "held_out")}
    raised = {"scale_at_birth": 0.25, "prunes": False, "lengths": {"ramp": 4}}
    for name, value in {"name": own["name"], "epochs": own["epochs"] + 3, **raised}.items():
        said = []
        config = configured(
            tmp_path / name, policies=[checkpoint], **{**alike, f"task__{name}": value}
        )
        Comparison(config, said.append, lambda: False)
        told = "lengths.ramp" if name == "lengths" else name
        assert [line.count(f" {told} ") for line in said] == [1] * (name != "name"), name


# -- pairs -----------------------------------------------------------------------------------------


def test_every_arm_of_a_seed_sees_the_same_data_at_the_same_rates(whole):
    plans = {seed: whole.log.epochs["never", LR, seed] for seed in range(3)}
    assert len({str(plan) for plan in plans.values()}) == 3, "seeds have orders of their own"
    for arm, seed in ((arm, seed) for arm in (*POLICIES, *STATIC_ARMS[:2]) for seed in plans):
        assert whole.log.epochs[arm, LR, seed] == plans[seed], (arm, seed)


def test_a_longer_or_shorter_episode_begins_with_the_same_data(whole):
    for seed in range(3):
        mine, others = (whole.log.epochs[arm, LR, seed] for arm in (STATIC_ARMS[2], "never"))
        assert len(mine) != len(others)
        for (rows, _), (other, _) in zip(mine, others, strict=False):
            assert rows == other


def test_the_host_alone_as_policy_as_sham_and_as_static_net_is_one_network_to_the_bit(whole):
    for seed in range(3):
        never, sham, start = (whole.log.left[arm, LR, seed] for arm in ("never", "sham", "start"))
        assert same(never, sham)
        assert same(never, start)
    scores = [
        [(row.validation_accuracy, row.test_loss) for row in whole.done[arm, 1.0].rows]
        for arm in STATIC_ARMS
    ]
    for arm in ("never", "sham"):
        assert [
            (row.validation_accuracy, row.test_loss) for row in whole.done[arm, 1.0].rows
        ] == scores[0]


def test_sham_growth_goes_through_the_events_of_the_named_arm(whole):
    def planted(arm):
        return [
            [(event["epoch"], event["slot"]) for event in own if event.get("op") == "GERMINATE"]
            for own in whole.done[arm, 1.0].events
        ]

    assert planted("sham") == planted("heuristic") != planted("random")
    assert all(planted("sham"))


def test_rows_are_in_the_order_of_seeds(whole):
    assert {tuple(row.seed for row in trials.rows) for trials in whole.done.values()} == {(0, 1, 2)}
    assert all(row.arm == arm for (arm, _), trials in whole.done.items() for row in trials.rows)


@pytest.mark.parametrize("arm", ["heuristic", "random"])
def test_an_arm_is_the_same_whichever_other_arms_run(arm, whole, tmp_path):
    (alone,) = compare(configured(tmp_path, policies=[arm])).values()
    assert timeless(alone) == timeless(whole.done[arm, 1.0])


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1] * 9), pytest.param(2, [2, 1] * 3, marks=pytest.mark.slow), (7, [6, 3]), (9, [9])],
)
def test_an_arm_is_the_same_however_many_hosts_live_side_by_side(most, sizes, whole, tmp_path):
    with logged() as log:
        done = compare(configured(tmp_path, policies=["never", "random", "heuristic"]), most=most)
    assert log.sizes == sizes
    for key, trials in done.items():
        assert timeless(trials) == timeless(whole.done[key])


def test_the_network_of_equal_flops_brings_its_yardstick_along(whole, tmp_path):
    done = compare(configured(tmp_path, policies=["heuristic"], static=["final-equal-flops"]))
    assert [arm for arm, _ in done] == ["heuristic", *STATIC_ARMS[1:]]
    assert all(timeless(trials) == timeless(whole.done[key]) for key, trials in done.items())


def test_more_seeds_change_nothing_for_the_others(whole, tmp_path):
    done = compare(
        configured(
            tmp_path, policies=POLICIES, static=STATIC, final_of=["heuristic"], seeds=2, seed=1
        )
    )
    for key, trials in done.items():
        expected = [part[1:] for part in timeless(whole.done[key])]
        assert [list(part) for part in timeless(trials)] == [list(part) for part in expected]


def test_an_arm_that_is_named_twice_is_one_arm(whole, tmp_path):
    done = compare(configured(tmp_path, policies=["random", "never", "random"]), most=9)
    assert timeless(done["random", 1.0]) == timeless(whole.done["random", 1.0])


# -- rates -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    """Every kind of arm at two rates, at one of which nothing can be learned."""
    few = {"task__slots": ["r0c1"], "task__blueprints": ["mlp"], "seeds": 2, "oracle": True}
    folder = tmp_path_factory.mktemp("rated")
    few |= {"final_of": ["heuristic"]}
    config = configured(folder, policies=POLICIES, static=STATIC, rates=[1e-6, 1.0], **few)
    with logged() as log:
        comparison = Comparison(config, lambda line: None, lambda: False)
        comparison.run()
    return SimpleNamespace(comparison=comparison, done=comparison.done, log=log)


@pytest.mark.slow
def test_every_arm_is_tried_at_every_rate(rated):
    names = {arm for arm, _ in rated.done}
    assert {*POLICIES, *STATIC_ARMS} < names
    assert any(name.startswith("oracle ") for name in names)
    assert set(rated.done) == {(name, rate) for name in names for rate in (1e-6, 1.0)}


def test_a_rate_is_a_multiple_of_the_tasks(rated):
    for arm, rate in rated.done:
        assert rated.log.epochs[arm, LR * rate, 0][0][1] == LR * rate


def test_the_better_rate_is_the_one_that_validation_likes():
    """Test scores say the opposite; nobody asks them."""

    def trials(rate, validation, test):
        return Trials(
            "heuristic",
            rate,
            (SimpleNamespace(validation_accuracy=validation, test_accuracy=test),),
            ((),),
            ((),),
        )

    known = [trials(0.5, 0.8, 0.99), trials(1.0, 0.9, 0.1), trials(2.0, 0.9, 0.5)]
    other = Trials(
        "never", 1.0, (SimpleNamespace(validation_accuracy=1.0, test_accuracy=1.0),), ((),), ((),)
    )
    done = {(one.arm, one.rate): one for one in [*known, other]}
    assert Comparison.best(SimpleNamespace(done=done), "heuristic") is known[1]


def test_final_networks_are_those_of_the_rate_that_validation_chose(rated):
    idle, chosen = (rated.done["heuristic", rate].architectures for rate in (1e-6, 1.0))
    assert rated.comparison.best("heuristic").rate == 1.0
    assert idle != chosen
    for arm in STATIC_ARMS[1:]:
        assert all(rated.done[arm, rate].architectures == chosen for rate in (1e-6, 1.0))


def test_rates_that_look_alike_have_files_of_their_own(tmp_path):
    own = Comparison.__new__(Comparison)
    own.config = SimpleNamespace(out=tmp_path, digest=lambda: "settings")
    places = [
        own._store("arms", "arm", "never", rate).manifest.name
        for rate in (1.0, 0.5, 0.3333333, 0.33333333)
    ]
    assert places == [
        "never-1.json",
        "never-0.5.json",
        "never-0.3333333.json",
        "never-0.33333333.json",
    ]


def test_sham_growth_replays_its_own_rate(rated, monkeypatch):
    """Rules plant alike at every rate, so one of them is told to have done nothing."""
    monkeypatch.setattr(comparison, "replay", lambda events: events)
    own, slow = copy(rated.comparison), rated.done["heuristic", 1e-6]
    own.done = {
        **rated.done,
        ("heuristic", 1e-6): replace(slow, events=tuple(() for _ in slow.events)),
    }
    assert [entry.policy for entry in own._entries("sham", 1e-6)] == [[], []]
    assert all(entry.policy for entry in own._entries("sham", 1.0))


# -- what it costs ---------------------------------------------------------------------------------


def test_all_that_an_episode_cost_is_in_its_row(whole):
    for (arm, _), trials in whole.done.items():
        for row in trials.rows:
            ledger = whole.log.ledgers[arm, LR, row.seed]
            assert row.flops == sum(cost.flops for cost in ledger.phases.values())
            assert row.peak_params == ledger.peak_params >= row.final_params
            assert ledger.phases["policy"].seconds > 0
            assert row.seconds >= ledger.phases["policy"].seconds
    grown = whole.log.ledgers["heuristic", LR, 0].phases
    assert grown["counterfactual"].flops > 0
    assert grown["counterfactual"].seconds > 0


def test_the_decisions_of_a_trained_policy_are_paid_for(checkpoint, whole, tmp_path, monkeypatch):
    """One that only waits costs its network's passes more than the host alone."""
    decide = NetworkPolicy.decide

    def wait(self, *seen):
        actions, memory = decide(self, *seen)
        return 0 * actions, memory

    monkeypatch.setattr(NetworkPolicy, "decide", wait)
    with logged() as log:
        (trials,) = compare(configured(tmp_path, policies=[checkpoint])).values()
    for row, alone in zip(trials.rows, whole.done["never", 1.0].rows, strict=True):
        policy = log.ledgers[checkpoint, LR, row.seed].phases["policy"]
        assert row.test_loss == alone.test_loss
        assert row.flops - alone.flops == policy.flops > 0
        assert policy.examples == row.epochs


@pytest.mark.slow
def test_a_trained_policy_does_in_its_arm_what_it_does_in_a_run_of_its_own(checkpoint, tmp_path):
    done = compare(configured(tmp_path / "compared", policies=["never", checkpoint]), most=6)
    rows, _, _ = timeless(done[checkpoint, 1.0])
    results = grow(
        grown_runs.configured(tmp_path / "grown", policy=checkpoint, hosts=3, task__held_out=64)
    )
    own = [
        {**to_record(replace(result, seconds=0)), "peak_params": row["peak_params"]}
        for result, row in zip(results, rows, strict=True)
    ]
    assert rows == own
    assert all(row["germinated"] for row in rows), "chosen so that it does something"


# -- stopped and gone on ---------------------------------------------------------------------------


def changed_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / ARMS).iterdir()}


def test_stopped_in_the_middle_and_gone_on_it_ends_the_same_and_no_arm_runs_twice(whole, tmp_path):
    config = configured(tmp_path, policies=POLICIES, static=STATIC, final_of=["heuristic"])
    kept = {}
    for calls in (1, 10, 13, 22):
        with pytest.raises(Stopped):
            compare(config, asked_at(calls))
        found = changed_times(tmp_path) if (tmp_path / ARMS).exists() else {}
        assert kept.items() <= found.items(), "what is finished is left alone"
        kept = found
    assert 2 < len(kept) < 7
    with logged() as log:
        done = compare(config)
    assert kept.items() <= changed_times(tmp_path).items()
    assert len({arm for arm, _, _ in log.left}) == 7 - len(kept)
    assert list(done) == list(whole.done)
    assert all_timeless(done) == all_timeless(whole.done)


def test_what_is_finished_is_read_and_not_run_again(whole):
    with logged() as log:
        assert compare(whole.config) == whole.done
    assert log.sizes == []


@pytest.mark.parametrize(
    "content", [b'{"arm": "never"', b"[]", b"{}", b"\xff\xfe", b'{"arm": 1, "rate": 1}'], ids=str
)
def test_a_damaged_arm_is_named_and_run_again_once_it_is_deleted(content, whole, tmp_path):
    config = configured(tmp_path, policies=["never"])
    path = tmp_path / ARMS / "never-1.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SaveError) as refusal:
        compare(config)
    assert all(word in str(refusal.value) for word in (f"{path} is damaged", "delete"))
    path.unlink()
    assert timeless(compare(config)["never", 1.0]) == timeless(whole.done["never", 1.0])


def test_an_arm_keeps_what_each_epoch_cost_and_the_loss_after_it(whole):
    trials = whole.done["heuristic", 1.0]
    for curve, row in zip(trials.curves, trials.rows, strict=True):
        (_, run) = next(
            item for item in whole.log.left.items() if item[0][0::2] == ("heuristic", row.seed)
        )
        measured = [event for event in run.events if isinstance(event, HostEpoch)]
        assert curve == tuple((e.epoch, e.flops, e.held_out_loss) for e in measured)
        assert len(curve) == TINY["task"]["epochs"]
    store = json.loads((whole.config.out / ARMS / "heuristic-1.json").read_text())
    assert "curves" in json.dumps(store)


def test_an_arm_on_disk_is_json_without_nan(whole):
    for path in (whole.config.out / ARMS).iterdir():
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


def test_arms_whose_names_look_alike_are_kept_apart(checkpoint, tmp_path):
    """Two policies in files that differ in a sign only."""
    (tmp_path / "a").mkdir()
    policies = [str(tmp_path / name) for name in ("a/b.st", "a_b.st")]
    for path in policies:
        with open(path, "wb") as file, open(checkpoint, "rb") as source:
            file.write(source.read())
    config = configured(tmp_path / "run", policies=policies, task__epochs=2)
    done = compare(config)
    assert compare(config) == done
    assert [row.arm for trials in done.values() for row in trials.rows] == [policies[0]] * 3 + [
        policies[1]
    ] * 3


# -- mistakes --------------------------------------------------------------------------------------


def test_a_static_start_and_a_checkpoint_called_final_follow_nobody(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with open("final.safetensors", "wb") as file, open(checkpoint, "rb") as source:
        file.write(source.read())
    config = configured(tmp_path / "run", policies=["never", "final.safetensors"], static=["start"])
    assert (list(config.files), list(config.static)) == (["final.safetensors"], ["start"])


def test_a_policy_that_reads_other_features_is_refused_before_anything_runs(checkpoint, tmp_path):
    tensors, plain = read_policy(Path(checkpoint))
    other = replace(plain["layout"], features=("mood",))
    path = tmp_path / "other.safetensors"
    path.write_bytes(seal(tensors, {**plain, "layout": other}))
    config = configured(tmp_path / "run", policies=["never", str(path)])
    with logged() as log, pytest.raises(CheckpointMismatchError, match="reads other features"):
        compare(config)
    assert log.sizes == []


def test_threads_are_as_asked_for_and_as_before_afterwards(tmp_path):
    seen = set()
    torch.set_num_threads(2)
    try:
        compare(
            configured(tmp_path, policies=["never"], task__epochs=2),
            lambda: seen.add(torch.get_num_threads()),
        )
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(1)
