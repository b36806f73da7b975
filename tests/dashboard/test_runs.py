"""A list of runs says what each is, how far it is and what it reached; what is not a run is not in
it.
"""

import io
import json
import os
import time

import pytest
from rich.console import Console

from dashboard.generated import as_lines, write_config
from dashboard.test_view import finished, lived
from epoch_records import grown_epoch
from esper.cli.app import main
from esper.cli.console import runs_table
from esper.dashboard import reader
from esper.dashboard.reader import RunReader, RunSummary, find_runs, summarise
from esper.leyline.errors import SaveError
from esper.telemetry.events import ArmFinished, RoundBegan, to_record


def make_run(folder, kind="ppo", events=(), **values):
    write_config(folder, kind, **values)
    (folder / "events-0.jsonl").write_bytes(as_lines(map(to_record, events)))
    return folder


def summary_of(folder):
    found = RunReader(folder)
    found.refresh()
    return summarise(found)


def test_only_run_folders_are_found_and_links_are_not_followed(tmp_path):
    inside, outside = tmp_path / "runs", tmp_path / "elsewhere"
    inside.mkdir()
    outside.mkdir()
    second, first = make_run(inside / "b"), make_run(inside / "a", "run")
    make_run(outside / "c")
    (inside / "link").symlink_to(outside / "c")
    (inside / "empty").mkdir()
    (inside / "foreign").mkdir()
    (inside / "foreign" / "config.json").write_text("{}")
    (inside / "borrowed").mkdir()
    (inside / "borrowed" / "config.json").symlink_to(outside / "c" / "config.json")
    (inside / "borrowed" / "events-0.jsonl").symlink_to(outside / "c" / "events-0.jsonl")
    (inside / "config.json").write_text("{}")
    assert find_runs(inside) == [first, second]


def test_a_run_folder_is_the_one_run_in_itself(tmp_path):
    assert find_runs(make_run(tmp_path / "a")) == [tmp_path / "a"]


def test_a_file_far_larger_than_events_are_is_not_read_and_the_others_are_listed(
    tmp_path, monkeypatch, capsys
):
    huge = make_run(tmp_path / "a", events=[RoundBegan(0)]) / "events-0.jsonl"
    make_run(tmp_path / "b", events=[RoundBegan(0)])
    os.truncate(huge, 2**37)
    read = []
    monkeypatch.setattr(
        reader,
        "_follow",
        lambda file, *rest, real=reader._follow: (read.append(1), real(file, *rest)),
    )
    with pytest.raises(SystemExit) as leaving:
        main(["runs", str(tmp_path), "--json"])
    rows = {row["name"]: row["status"] for row in json.loads(capsys.readouterr().out)}
    assert (leaving.value.code, rows, read) == (0, {"a": "damaged", "b": "stopped"}, [1])


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_folder_that_is_not_there_is_an_error(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=f"{name}: "):
        find_runs(tmp_path / name)


def test_a_ppo_run_has_its_best_rounds_accuracy_and_its_hosts_mean_size(tmp_path):
    rounds = []
    for number, accuracy in enumerate((0.5, 0.875, 0.75)):
        event = finished(number, {})
        rounds += [
            RoundBegan(number),
            lived(2, 0, number),
            lived(2, 1, number),
            to_record(event) | {"accuracy": accuracy},
        ]
    folder = make_run(tmp_path / "first", rounds=40)
    records = [event if isinstance(event, dict) else to_record(event) for event in rounds]
    records[-2]["params"] = 440
    (folder / "events-0.jsonl").write_bytes(as_lines(records))
    os.utime(folder / "events-0.jsonl", (time.time() - 500, time.time() - 500))
    found = summary_of(folder)
    assert (found.name, found.path, found.kind, found.task, found.policy) == (
        "first",
        folder,
        "ppo",
        "digits",
        "ppo",
    )
    assert (found.status, found.done, found.total, found.events) == ("stopped", 3, 40, 12)
    assert (found.best_accuracy, found.params) == (0.875, 439)
    assert 499 < found.age_seconds < 600


def grown(host, epoch, accuracy, params):
    return grown_epoch(host, epoch + 1, 0.5, 0.5, accuracy, params, 10)


def scored(seed, validation, params):
    return ArmFinished("heuristic", seed, 2, 438, params, validation, 0.99, 0.5, 9, 1.5, 1, 1, 0)


def test_a_grow_run_has_the_best_hosts_newest_accuracy_and_its_size(tmp_path):
    episodes = [
        grown(0, 0, 0.9, 500),
        grown(1, 0, 0.1, 500),
        grown(0, 1, 0.5, 600),
        grown(1, 1, 0.75, 700),
    ]
    found = summary_of(make_run(tmp_path / "a", "run", episodes, hosts=2))
    assert (found.best_accuracy, found.params, found.policy) == (0.75, 700, "heuristic")
    assert (found.status, found.done, found.total) == ("stopped", 2, 0)
    done = summary_of(
        make_run(
            tmp_path / "b", "run", [*episodes, scored(0, 0.8, 610), scored(1, 0.7, 710)], hosts=2
        )
    )
    assert (done.best_accuracy, done.params) == (0.8, 610)
    assert (done.status, done.done, done.total) == ("finished", 2, 2)


def test_a_run_that_has_told_nothing_yet_is_listed(tmp_path):
    for kind in ("ppo", "run"):
        found = summary_of(make_run(tmp_path / kind, kind))
        assert (found.best_accuracy, found.params, found.done, found.status) == (
            None,
            None,
            0,
            "stopped",
        )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"rounds": 4}', '{"task": "digits"}', "\x00"]
)
def test_a_run_whose_configuration_is_damaged_is_listed_as_such(tmp_path, content):
    folder = make_run(tmp_path / "a")
    (folder / "config.json").write_text(content)
    assert find_runs(tmp_path) == [folder]
    assert summary_of(folder).status == "damaged"


@pytest.mark.parametrize(
    "values", [{"rounds": "many"}, {"rounds": -3}, {"task": {"name": ["x"]}}, {"hosts": None}]
)
def test_odd_settings_do_not_break_the_list(tmp_path, values):
    for kind in ("ppo", "run"):
        assert summary_of(make_run(tmp_path / kind, kind, **values)).status == "stopped"


def rendered(*summaries):
    console = Console(file=io.StringIO(), width=120)
    console.print(runs_table(summaries))
    return console.file.getvalue()


def row(**values):
    known = {
        "name": "first",
        "path": None,
        "kind": "ppo",
        "task": "digits",
        "policy": "ppo",
        "status": "running",
    }
    numbers = {
        "done": 12,
        "total": 40,
        "best_accuracy": 0.93372,
        "params": 1234567,
        "age_seconds": 7300.0,
        "events": 9,
    }
    return RunSummary(**{**known, **numbers, **values})


def test_the_table_shows_every_run():
    text = rendered(
        row(), row(name="second", total=0, best_accuracy=None, params=None, age_seconds=None)
    )
    first, second = (
        next(line for line in text.splitlines() if name in line) for name in ("first", "second")
    )
    assert first.split() == [
        "first",
        "digits",
        "ppo",
        "running",
        "12/40",
        "93.37%",
        "1,234,567",
        "2",
        "h",
    ]
    assert second.split()[4:] == ["12/?", "-", "-", "-"]


def test_names_are_neither_markup_nor_orders_to_the_terminal():
    text = rendered(row(name="[red]x[/red]\x1b[2J", task="[/]"))
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
