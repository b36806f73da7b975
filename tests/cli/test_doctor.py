"""`esper doctor` on screen and as JSON."""

import json
import sys

import pytest

from esper.cli import main
from esper.cli.doctor import advice
from esper.runtime import diagnosis
from esper.runtime.diagnosis import Finding


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    streams = capsys.readouterr()
    return leaving.value.code or 0, streams.out, streams.err


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_it_shows_all_topics_and_whole_commands_that_mend(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "textual", None)
    _, out, err = call(capsys, "doctor")
    assert err == ""
    for topic in ("versions", "devices", "extras", "data"):
        assert f"\n  {topic} " in out
    assert "pip install 'esper-lite[tui]'\n" in out
    assert "esper data fetch cifar10_resnet --data-root DIR\n" in out


def test_as_json_it_is_one_document_with_every_finding(capsys, tmp_path):
    _, out, err = call(capsys, "doctor", "--json", "--data-root", str(tmp_path))
    told = json.loads(out)
    assert err == ""
    names = {(row["topic"], row["name"]) for row in told["findings"]}
    assert {("versions", "python"), ("devices", "cpu"), ("extras", "rl")} <= names
    assert {"topic", "name", "state", "mend", "is_broken"} == set(told["findings"][0])


def test_what_is_broken_is_named_and_the_exit_code_says_so(capsys, monkeypatch):
    broken = Finding("versions", "torch", "not installed", "pip install torch", True)
    monkeypatch.setattr(diagnosis, "examine", lambda package, root: [broken])
    code, out, _ = call(capsys, "doctor")
    assert code == 1
    assert "torch  pip install torch\n" in out
    assert out.endswith("Esper does not work here: mend torch.\n")
    code, out, _ = call(capsys, "doctor", "--json")
    assert (code, json.loads(out)["works"]) == (1, False)


def test_where_nothing_is_missing_it_says_that_it_works():
    assert advice([Finding("devices", "cpu", "2 cores")]) == ["Esper works here."]
