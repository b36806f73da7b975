"""Settings that nobody can mean are one line, before anything is built."""

import io
import os
import threading

import pytest
from rich.console import Console

from esper.cli.app import main
from esper.cli.console import arms_table
from esper.cli.session import teller
from esper.leyline.configuration import leaves, read_json, read_setting
from esper.leyline.errors import CheckpointMismatchError, EsperError, SettingError
from esper.simic.config import TrainingConfig
from esper.storage.store import NewFile, Store
from esper.telemetry.curve_export import TRACKERS, TrackingSink
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import ArmFinished, HostRolledBack
from esper.telemetry.sink import Sink
from esper.trials.config import CompareConfig, RunConfig
from esper.trials.searching import read_search
from faults.commands import CLEAR, run

HUGE = (10**50, -(10**50), 1e300, -1e300)
MODELS = (TrainingConfig, RunConfig, CompareConfig)
KINDS = ("int", "float")
FIELDS = [
    (model, key, str(field.annotation)) for model in MODELS for key, field in leaves(model).items()
]
NUMBERS = [
    (model, key) for model, key, annotation in FIELDS if any(kind in annotation for kind in KINDS)
]


@pytest.mark.parametrize(
    ("model", "key"), NUMBERS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_number_has_an_upper_and_a_lower_bound(model, key):
    for huge in HUGE:
        for value in (huge, [huge], {"rent": huge}):
            with pytest.raises(SettingError, match=key.split(".")[-1]):
                model.start().with_changes([(key, value)], "the test")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ppo.value_clip", 4e38),
        ("threads", 10**7),
        ("task.epoch_examples", 2**53),
        ("hosts", 10**9),
        ("host_pool", 10**9),
        ("task.epochs", 10**9),
        ("task.name", "a\0b"),
        ("out", "a\0b"),
        ("reward.weights", {"rent": 1e30}),
    ],
)
def test_what_once_took_all_memory_or_broke_is_refused(key, value):
    with pytest.raises(SettingError, match=key.split(".")[-1]):
        TrainingConfig.start().with_changes([(key, value)], "the test")


def test_what_a_run_settles_for_itself_can_be_read_again():
    """The largest settings give the longest line of annealing."""
    largest = [
        ("rounds", 10**9),
        ("hosts", 10_000),
        ("host_pool", 100_000),
        ("task.epochs", 100_000),
    ]
    settled = TrainingConfig.start().with_changes(largest, "the test").settled()
    assert TrainingConfig.of(settled.model_dump(mode="json")) == settled


@pytest.mark.parametrize(
    "text", ["episodes=1000000000000", "hosts=100000", "plans=1000000000", f"seed={10**50}"]
)
def test_a_search_has_bounds_too(text):
    with pytest.raises(EsperError, match=text.partition("=")[0]):
        read_search(f"search:{text}")


def test_a_setting_as_deep_as_a_well_is_text():
    assert read_setting("hosts=" + "[" * 100_000)[1].startswith("[[")


def huge(path):
    with open(path, "wb") as file:
        file.truncate(2**40)
    return path


def test_a_file_larger_than_any_policy_is_refused_before_it_is_read(tmp_path):
    policy = huge(tmp_path / "policy.safetensors")
    for values in ({"policy": str(policy)}, {"policies": [str(policy)]}):
        with pytest.raises(SettingError, match=str(policy)):
            (RunConfig if "policy" in values else CompareConfig).of(values)


def test_of_settings_without_end_a_bounded_part_is_read(tmp_path):
    for path in ("/dev/zero", huge(tmp_path / "huge.json")):
        with pytest.raises(SettingError, match=str(path)):
            read_json(path)


def test_settings_may_come_through_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=('{"hosts": 2}',))
    writer.start()
    assert read_json(tmp_path / "pipe") == {"hosts": 2}
    writer.join()


@pytest.mark.parametrize("text", [r'"\u001b[31mred"', r'"\u0000"', r'"a\nb"'])
def test_a_control_character_is_refused_however_it_is_written(text):
    with pytest.raises(SettingError, match="out"):
        RunConfig.start().with_changes([read_setting(f"out={text}")], "the test")


@pytest.mark.parametrize("option", ["--out", "--policy", "--data-root", "--config-json"])
def test_a_path_of_3000_letters_is_one_line(tmp_path, option):
    more = ["--task", "cifar10"] if option == "--data-root" else []
    where = [] if option == "--out" else ["--out", tmp_path / "run"]
    assert (
        run(tmp_path / "process", ["run", option, tmp_path / ("a" * 3000), *more, *where])[0]
        == CLEAR
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["dir[/b]/p", "[red]p", "p\x1b[2J"])
def test_what_a_user_named_is_printed_as_it_is_and_never_obeyed(name):
    result = ArmFinished(name, 0, 3, 1, 2, 0.5, 0.5, 1.0, 10, 1.0, 0, 0, 0)
    text = io.StringIO()
    Console(file=text, width=200, color_system="truecolor", force_terminal=True).print(
        arms_table([result], name)
    )
    shown = name.replace("\x1b", r"\x1b")
    assert text.getvalue().count(shown) == 2


ODD = "p\x1b[2J\u202e\ud800"


def tell_of_a_save(folder, monkeypatch):
    store = Store(folder / "manifest.json", "thing", keep=2)
    for _ in range(2):
        store.save({}, {"host": NewFile("host.bin", b"content")})
    (folder / "host-2.bin").unlink()
    store.newest()


def tell_of_events(folder, monkeypatch):
    (folder / "events-0.jsonl").mkdir()
    Sink(folder / "events-0.jsonl", TelemetryConfig())


def tell_of_a_tracker(folder, monkeypatch):
    def fail(*given):
        raise ValueError(ODD)

    monkeypatch.setitem(TRACKERS, "wandb", fail)
    with TrackingSink(folder / "events-0.jsonl", TelemetryConfig(), ["wandb"], {}) as sink:
        sink.write(ArmFinished("never", 0, 3, 1, 2, 0.5, 0.5, 1.0, 10, 1.0, 0, 0, 0))


def tell_of_a_rollback(folder, monkeypatch):
    teller(Console())(str(HostRolledBack(0, 1, ODD)))


def tell_of_an_error(folder, monkeypatch):
    def fail(**given):
        raise CheckpointMismatchError(f"{folder} differs:\n  slots\n  {ODD}")

    monkeypatch.setattr("esper.cli.app.app", fail)
    with pytest.raises(SystemExit):
        main(["runs"])


def tell_of_a_report(folder, monkeypatch):
    monkeypatch.setattr("esper.dashboard.report.write_report", lambda runs, out: None)
    with pytest.raises(SystemExit):
        main(["report", "run", "--out", str(folder)])


TELLS = (
    tell_of_a_save,
    tell_of_events,
    tell_of_a_tracker,
    tell_of_a_rollback,
    tell_of_an_error,
    tell_of_a_report,
)


@pytest.mark.parametrize("tell", TELLS)
def test_what_is_told_is_one_line_that_no_terminal_obeys(tmp_path, monkeypatch, capsys, tell):
    folder = tmp_path / ODD.replace("\ud800", "\udcff")
    folder.mkdir()
    tell(folder, monkeypatch)
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert line.isprintable()
