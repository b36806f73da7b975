"""benchmarks/records.py: no benchmark replaces a result that is there unless it is told to."""

import argparse
import json
import runpy
import sys

import pytest

from readme_tables import ROOT

SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "records.py"))


def read_options(*arguments):
    parser = argparse.ArgumentParser()
    SCRIPT["add_options"](parser)
    return parser.parse_args([str(argument) for argument in arguments])


def write_record(record, *arguments):
    options = read_options(*arguments)
    SCRIPT["claim"](options)
    SCRIPT["keep"](options, record)


def test_a_file_that_exists_is_refused_before_anything_is_measured(tmp_path):
    out = tmp_path / "found.json"
    write_record({"rows": [1]}, "--out", out)
    with pytest.raises(SystemExit, match="--replace"):
        write_record({"rows": [2]}, "--out", out)
    assert json.loads(out.read_text()) == {"rows": [1]}
    write_record({"rows": [2]}, "--out", out, "--replace")
    assert json.loads(out.read_text()) == {"rows": [2]}


def test_a_named_run_stands_beside_the_others_and_replaces_none(tmp_path):
    out = tmp_path / "found.json"
    write_record({"rows": [1]}, "--out", out, "--name", "one")
    write_record({"rows": [2]}, "--out", out, "--name", "two")
    with pytest.raises(SystemExit, match="one"):
        write_record({"rows": [3]}, "--out", out, "--name", "one")
    assert json.loads(out.read_text()) == {"runs": {"one": {"rows": [1]}, "two": {"rows": [2]}}}


def test_a_single_record_takes_no_named_run_beside_it(tmp_path):
    out = tmp_path / "found.json"
    write_record({"rows": [1]}, "--out", out)
    with pytest.raises(SystemExit, match="runs"):
        write_record({"rows": [2]}, "--out", out, "--name", "two", "--replace")
    assert json.loads(out.read_text()) == {"rows": [1]}


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_record({"rows": [1]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["questions.py", "sweep.py"])
def test_a_committed_result_is_not_measured_again_by_default(script, monkeypatch):
    arguments = ["q1-digits"] if script == "questions.py" else []
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit, match="exists"):
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
