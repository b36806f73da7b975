"""With `--json` a command prints one JSON document on standard output, and nothing else."""

import json
import math
from dataclasses import replace

import pytest
from typer.main import get_command

from dashboard.test_tables import DONE
from esper.cli import app as cli
from esper.cli import main, run
from esper.cli.console import print_json

SCREENS = {"watch", "serve", "data"}
"""What is looked at, and what only groups commands."""


def commands():
    """Every command, also those in a group, by what is written after `esper`."""
    known = dict(get_command(cli.app).commands)
    group = known["data"]
    return {**known, **{f"data {name}": inner for name, inner in group.commands.items()}}


@pytest.mark.parametrize("name", sorted(set(commands()) - SCREENS))
def test_every_command_that_prints_a_result_has_json(name):
    command = commands()[name]
    parameters = command.get_params(command.make_context(name, [], resilient_parsing=True))
    assert "--json" in [option for parameter in parameters for option in parameter.opts]


def document(capsys, *arguments):
    """The document that a command prints on standard output, read strictly."""
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--json"])
    out = capsys.readouterr().out
    assert leaving.value.code in (None, 0)

    def refuse(name):
        raise ValueError(name)

    return json.loads(out, parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished `esper run`."""
    folder = tmp_path_factory.mktemp("runs") / "points"
    with pytest.raises(SystemExit) as leaving:
        main(["run", "--task", "blobs", "--epochs", "3", "--hosts", "2", "--out", str(folder)])
    assert leaving.value.code in (None, 0)
    return folder


def test_a_run_leaves_its_results_as_csv_too(finished):
    names, *rows = (finished / "results.csv").read_text().splitlines()
    assert names.split(",")[:2] == ["arm", "seed"]
    assert len(rows) == 2


def test_a_table_is_csv_or_json(capsys, finished):
    rows = document(capsys, "table", str(finished), "epochs")
    assert [(row["host"], row["epoch"]) for row in rows] == [
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
    ]
    with pytest.raises(SystemExit):
        main(["table", str(finished)])
    assert capsys.readouterr().out == (finished / "results.csv").read_text()


def test_a_table_that_is_not_there_is_one_line(capsys, finished):
    with pytest.raises(SystemExit) as leaving:
        main(["table", str(finished), "epoch"])
    streams = capsys.readouterr()
    assert (leaving.value.code, streams.out) == (2, "")
    assert "Did you mean 'epochs'?" in streams.err


def test_an_export_says_where_it_is_and_what_it_is_worth(capsys, finished, tmp_path):
    told = document(capsys, "export", str(finished), "--to", str(tmp_path / "net"))
    assert told["folder"] == str(tmp_path / "net")
    assert told["arm"] == "heuristic"
    assert (tmp_path / "net/grown.py").is_file()


def test_a_report_says_where_it_is(capsys, finished, tmp_path):
    page = tmp_path / "page.html"
    told = document(capsys, "report", str(finished), "--out", str(page))
    assert told == {"report": str(page), "runs": [str(finished)]}
    assert page.is_file()


def test_fetching_says_what_became_of_every_file(capsys):
    told = document(capsys, "data", "fetch", "blobs")
    assert told["name"] == "blobs"
    assert told["files"][0].startswith("blobs needs no fetching")


def test_the_demo_has_both_results(capsys, monkeypatch, tmp_path):
    def play(config, resume, console):
        console.print("progress for people")
        return [replace(DONE, arm=config.policy)]

    monkeypatch.setattr(run, "run_policy", play)
    monkeypatch.setattr(run, "export_run", lambda grown, folder: {})
    monkeypatch.chdir(tmp_path)
    told = document(capsys, "demo", "--epochs", "8")
    assert [result["arm"] for result in told["results"]] == ["never", "heuristic"]
    assert told["exported"] == "runs/demo/exported"


def test_a_number_that_json_has_no_form_for_is_null(capsys):
    print_json({"loss": math.nan, "rate": [math.inf, 1.5]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "rate": [None, 1.5]}
