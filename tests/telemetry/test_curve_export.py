"""Numbers for trackers:

which ones, that they arrive, that a resume repeats none, and that a failure stops nobody.
"""

import json
import os
import re
import resource
import sys
from types import ModuleType

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from epoch_records import grown_epoch
from esper.cli.ppo import run_ppo
from esper.cli.run import run_policy
from esper.dashboard.reader import RunReader
from esper.leyline.errors import MissingExtraError, SettingError
from esper.runtime.config import TaskConfig
from esper.storage.runfolder import CONFIG, EVENTS
from esper.telemetry.curve_export import TRACKERS, TrackingSink, require_trackers, scalars_of
from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.events import EVENT_TYPES, ArmFinished, GrowthHint, RoundBegan, RoundFinished
from simic.tiny_runs import assert_same_end, events_of, tiny
from trials import grown_runs
from trials.grown_runs import asked_at, configured

QUIET = Console(quiet=True)
HEAD = {"loss": 0.1, "entropy": 0.9, "clip_fraction": 0.25, "ratio_max": 1.5, "steps": 12}
UPDATE = {
    "approx_kl": 0.01,
    "explained_variance": None,
    "heads": {"op": HEAD},
    "first_ratio_gap": {"op": 0.0, "joint": 1e-7},
    "first_worst": {"host": 5, "epoch": 4, "head": "op", "ratio": 1.1},
    "early_stop_epoch": None,
    "explosion": {"worst": [{"host": 1, "ratio": 9.0}], "count": 1},
}


def finished(number, accuracy=0.5, update=UPDATE):
    ops, parts = {"WAIT": 3, "CULL": 1}, {"rent": -0.5}
    return RoundFinished(number, 24, -0.5, accuracy, 0.25, 1.5, parts, ops, 2, 1, 1, 0, update, 3.5)


def grown(host, epoch, accuracy=0.5):
    return grown_epoch(host, epoch, None, 1.5, accuracy, 100, 2000)


RESULT = ArmFinished("heuristic", 3, 8, 100, 150, 0.75, 0.5, 1.25, 9000, 2.5, 2, 1, 0)


@pytest.fixture(autouse=True)
def _files_in_order(monkeypatch):
    """Of one second TensorBoard sorts files by a counter as text; no process that resumes a run
    counts to ten in it.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


# -- what is tracked -------------------------------------------------------------------------------


def test_of_a_round_every_number_is_tracked_and_no_address():
    assert scalars_of(finished(7)) == (
        7,
        {
            "round/decisions": 24,
            "round/mean_return": -0.5,
            "round/accuracy": 0.5,
            "round/twin_accuracy": 0.25,
            "round/params_share": 1.5,
            "round/germinated": 2,
            "round/fossilized": 1,
            "round/culled": 1,
            "round/refused": 0,
            "round/seconds": 3.5,
            "reward_parts/rent": -0.5,
            "ops/WAIT": 3,
            "ops/CULL": 1,
            "update/approx_kl": 0.01,
            **{f"update/heads/op/{name}": value for name, value in HEAD.items()},
            "update/first_ratio_gap/op": 0.0,
            "update/first_ratio_gap/joint": 1e-7,
            "update/explosion/count": 1,
        },
        "round",
    )


def test_hosts_that_grow_have_curves_of_their_own_and_what_is_not_measured_has_no_point():
    step, values, _ = scalars_of(grown(2, 5))
    assert (step, values.pop("host-2/params"), values.pop("host-2/flops")) == (5, 100, 2000)
    assert values == {"host-2/held_out_loss": 1.5, "host-2/held_out_accuracy": 0.5}


def test_a_result_stands_behind_the_last_epoch():
    step, values, _ = scalars_of(RESULT)
    assert (step, values["result/seed-3/test_accuracy"], values["result/seed-3/final_params"]) == (
        8,
        0.5,
        150,
    )


def test_of_the_many_small_events_nothing_is_tracked():
    tracked = {"RoundFinished", "HostEpoch", "ArmFinished"}
    for name, kind in EVENT_TYPES.items():
        if name not in tracked:
            assert scalars_of(object.__new__(kind)) is None


# -- trackers --------------------------------------------------------------------------------------


def curves(run):
    """Tag -> (step, value) for every point that TensorBoard shows."""
    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    return {
        tag: [(point.step, float(point.tensor_proto.float_val[0])) for point in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }


class FakeWandb(ModuleType):
    """Notes what wandb would be told."""

    def __init__(self):
        super().__init__("wandb")
        self.opened, self.points, self.finished, self.axes, self.run = [], [], 0, {}, None

    def init(self, **options):
        self.opened.append(options)
        return self

    def define_metric(self, name, step_metric):
        assert name not in self.axes
        self.axes[name] = step_metric

    def log(self, values):
        assert values.keys() - {"epoch", "round"} <= self.axes.keys()
        self.points.append(values)

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def write_all(run, events, names=("tensorboard",), level="normal"):
    """Write events through a tracking sink, as a run does; what the sink was."""
    run.mkdir(exist_ok=True)
    with TrackingSink(run / EVENTS, TelemetryConfig(level), names, {"seed": 3}) as sink:
        for event in events:
            sink.write(event)
    return sink


def test_tensorboard_has_every_number_at_its_step(tmp_path):
    write_all(tmp_path, [RoundBegan(0), finished(0, 0.5), RoundBegan(1), finished(1, 0.75)])
    found = curves(tmp_path)
    assert found.keys() == scalars_of(finished(0))[1].keys()
    assert found["round/accuracy"] == [(0, 0.5), (1, 0.75)]


def test_tensorboard_shows_the_steps_of_a_resumed_run_once_and_as_they_are_now(tmp_path):
    write_all(tmp_path, [finished(number, 0.25) for number in range(4)])
    write_all(tmp_path, [finished(number, 0.75) for number in (2, 3, 4)])
    assert curves(tmp_path)["round/accuracy"] == [
        (0, 0.25),
        (1, 0.25),
        (2, 0.75),
        (3, 0.75),
        (4, 0.75),
    ]


def test_what_is_tracked_does_not_depend_on_the_level_of_the_records(tmp_path):
    write_all(tmp_path, [finished(0), grown(0, 0)], level="off")
    assert (tmp_path / EVENTS).read_text() == ""
    assert {"round/accuracy", "host-0/params"} <= curves(tmp_path).keys()


def test_wandb_is_opened_once_offline_in_the_run_folder_with_the_configuration(wandb, tmp_path):
    write_all(tmp_path / "mine", [RoundBegan(0), finished(0), finished(1)], ["wandb"])
    assert wandb.opened == [
        {
            "mode": "offline",
            "dir": str(tmp_path / "mine"),
            "name": "mine",
            "group": "mine",
            "config": {"seed": 3},
        }
    ]
    assert [point["round"] for point in wandb.points] == [0, 1]
    assert wandb.points[1] == {**scalars_of(finished(1)).values, "round": 1}
    assert wandb.finished == 1


def test_wandb_drops_no_number_of_a_host_whose_epochs_come_late(wandb, tmp_path):
    events = [grown(0, 1), grown(0, 2), grown(1, 1), finished(0)]
    write_all(tmp_path, events, ["wandb"])
    assert [point.get("epoch") for point in wandb.points] == [1, 2, 1, None]
    assert wandb.axes["host-1/params"] == "epoch"
    assert wandb.axes["round/accuracy"] == "round"


def test_a_run_of_wandb_that_the_script_has_open_gets_the_curves_and_stays_open(wandb, tmp_path):
    wandb.run = wandb
    write_all(tmp_path, [finished(0)], ["wandb"])
    assert (wandb.opened, wandb.finished) == ([], 0)
    assert wandb.points[0]["round"] == 0


def test_wandb_goes_online_where_its_variable_says_so(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    write_all(tmp_path, [finished(0)], ["wandb"])
    assert wandb.opened[0]["mode"] == "online"


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_refused_with_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"{name}\. .*pip install 'esper-lite\[track\]'"):
        require_trackers([name])


def test_tensorboard_is_there():
    require_trackers(["tensorboard"])


# -- the sink in between ---------------------------------------------------------------------------


def test_the_sink_passes_everything_on(tmp_path):
    with TrackingSink(tmp_path / EVENTS, TelemetryConfig("debug"), [], {}) as sink:
        sink.write(GrowthHint(0, 1, "hm"))
        end = sink.commit()
        sink.write_record("X", {"n": 1}, TelemetryLevel.DEBUG)
        assert end < sink.commit()
        sink.rewind(end)
        assert sink.wants(TelemetryLevel.DEBUG)
        assert (0, sink.path.stat().st_size) == end


def test_nothing_is_opened_before_the_first_event(tmp_path, wandb):
    write_all(tmp_path, [], ["tensorboard", "wandb"])
    assert (sorted(os.listdir(tmp_path)), wandb.opened) == ([EVENTS], [])


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_disturbs_neither_disk_nor_others(
    moment, tmp_path, wandb, monkeypatch, capsys
):
    def fail(*args, **options):
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(wandb, moment, fail)
    write_all(tmp_path, [RoundBegan(0), finished(0), finished(1)], ["wandb", "tensorboard"])
    assert re.fullmatch(r"esper: wandb .*\(no; network\).*\n", capsys.readouterr().err)
    assert len((tmp_path / EVENTS).read_text().splitlines()) == 3
    assert curves(tmp_path)["round/culled"] == [(0, 1), (1, 1)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_stops_tensorboard_and_nothing_else(tmp_path, capsys):
    """TensorBoard's file grows faster than ours, so a limit in between stops it alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, before[1]))
    try:
        write_all(tmp_path, [finished(number) for number in range(15)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(re.findall("esper: tensorboard .*Errno 27", capsys.readouterr().err)) == 1
    assert len((tmp_path / EVENTS).read_text().splitlines()) == 15


def test_an_interruption_is_not_swallowed(tmp_path, wandb, monkeypatch):
    def interrupt(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(wandb, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_all(tmp_path, [finished(0)], ["wandb"])


# -- runs ------------------------------------------------------------------------------------------


def test_a_tracked_training_is_the_same_training_with_curves(tmp_path):
    run_ppo(tiny(tmp_path / "plain"), False, QUIET)
    run_ppo(tiny(tmp_path / "tracked", telemetry__track=["tensorboard"]), False, QUIET)
    assert_same_end(tmp_path / "plain", tmp_path / "tracked")
    rounds = events_of(tmp_path / "tracked", "RoundFinished")
    assert curves(tmp_path / "tracked")["round/mean_return"] == [
        (row["round"], pytest.approx(row["mean_return"], rel=1e-6)) for row in rounds
    ]


def test_a_training_that_is_gone_on_with_has_each_round_once(tmp_path):
    run = tmp_path / "run"
    config = tiny(run, telemetry__track=["tensorboard"], rounds=3)
    run_ppo(
        config.with_changes([("rounds", 2), ("ppo.anneal_decisions", 18)], "the test"), False, QUIET
    )
    (run / "checkpoints/round-000002.safetensors").write_bytes(
        b""
    )  # so that a round is lived again
    run_ppo(config, True, QUIET)
    assert [step for step, _ in curves(run)["round/accuracy"]] == [0, 1, 2]
    run_ppo(tiny(tmp_path / "whole", rounds=3), False, QUIET)
    assert_same_end(run, tmp_path / "whole")
    reader = RunReader(run)
    reader.refresh()
    assert (reader.status(), reader.progress(), reader.view.unknown) == ("finished", (3, 3), 0)


def test_grown_hosts_have_curves_and_go_on_where_they_were(tmp_path, monkeypatch):
    whole, cut = (
        configured(tmp_path / name, telemetry={"track": ["tensorboard"]})
        for name in ("whole", "cut")
    )
    assert run_policy(whole, False, QUIET) is not None
    stop = asked_at(3)
    with monkeypatch.context() as patch:
        patch.setattr("esper.cli.run.run_hosts", _stopping(stop))
        assert run_policy(cut, False, QUIET) is None
    assert run_policy(cut, True, QUIET) is not None
    grown_runs.assert_same_end(whole.out, cut.out)
    found, expected = curves(cut.out), curves(whole.out)
    assert found.keys() == expected.keys()
    assert {tag for tag in found if found[tag] != expected[tag]} <= {
        f"result/seed-{seed}/seconds" for seed in (0, 1)
    }
    assert [step for step, _ in found["host-1/params"]] == list(range(1, 9))


def _stopping(stop):
    from esper.trials.running import run_hosts

    return lambda *args, should_stop, **options: run_hosts(*args, should_stop=stop, **options)


def test_a_refused_start_leaves_nothing_of_a_tracker_behind(tmp_path, wandb):
    config = tiny(tmp_path / "run", task__held_out=99999, telemetry__track=["tensorboard", "wandb"])
    with pytest.raises(SettingError):
        run_ppo(config, False, QUIET)
    assert list(tmp_path.iterdir()) == []
    assert wandb.opened == []


def test_a_missing_package_is_refused_before_the_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for start, config in (
        (run_ppo, tiny(tmp_path / "a", telemetry__track=["wandb"])),
        (run_policy, configured(tmp_path / "b", telemetry={"track": ["wandb"]})),
    ):
        with pytest.raises(MissingExtraError, match="wandb"):
            start(config, False, QUIET)
    assert list(tmp_path.iterdir()) == []


def test_a_grown_run_writes_down_how_long_it_lasts_and_how_large_it_may_get(tmp_path):
    config = configured(tmp_path / "run", hosts=1, task__epochs=2)
    config = config.model_copy(update={"task": config.task.model_copy(update={"budget": None})})
    run_policy(config, False, QUIET)
    saved = json.loads((config.out / CONFIG).read_text())["task"]
    task = config.task.build()
    assert (saved["epochs"], saved["budget"]) == (task.epochs, task.budget)
    assert TaskConfig.of(saved).build() == task
