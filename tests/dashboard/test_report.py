"""One file that tells everything, runs nothing that it was not built with, and is never half
written.
"""

import json
import os
import re
import shlex
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dashboard.web_runs import append, config_of, grow_run, ppo_run
from esper import __version__
from esper.cli import main, run
from esper.dashboard.report import STATIC, reproduce, script_names, write_report
from esper.leyline.errors import SaveError
from esper.trials.config import RunConfig

BAD = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> &amp;"


class Parts(HTMLParser):
    """Scripts, styles and addresses of a page, as a browser's parser finds them."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.styles, self.addresses, self.tags, self._open = [], [], [], [], None
        self.data = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]
        scripts = self.data if ("id", "report-data") in attrs else self.scripts
        self._open = {"script": scripts, "style": self.styles}.get(tag)

    def handle_data(self, data):
        if self._open is not None:
            self._open.append(data)

    def handle_endtag(self, tag):
        self._open = None


def report_of(tmp_path, *runs):
    write_report(runs, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    parts = Parts(text)
    return text, parts, json.loads("".join(parts.data))


def test_it_holds_all_that_a_lab_book_wants(tmp_path):
    never, grown = grow_run(tmp_path / "never", "never", test=0.8), grow_run(tmp_path / "grown")
    _, _, data = report_of(tmp_path, grown, never)
    run = data["runs"][0]
    assert data["version"] == __version__
    assert run["rest"]["config"]["task"]["epochs"] == 6
    assert run["rest"]["ledgers"][0]["flops"] == {"training": 4_000_000, "validation": 1_000_000}
    assert [span["fate"] for span in run["episodes"][1]["spans"]] == ["FOSSILIZED", "CULLED"]
    assert run["episodes"][0]["spans"][0]["verdicts"][-1]["reason"].startswith("contribution")
    gains = {row["policy"]: row["gain"] for row in data["standings"]}
    assert gains["heuristic"]["mean"] == pytest.approx(0.1)
    assert gains["never"] is None


def test_it_asks_nobody_for_anything(tmp_path):
    text, parts, _ = report_of(tmp_path, ppo_run(tmp_path / "run"))
    assert parts.addresses == []
    assert "link" not in parts.tags
    assert "url(http" not in text


def test_only_the_scripts_and_styles_it_was_built_with_may_run(tmp_path):
    text, parts, _ = report_of(tmp_path, grow_run(tmp_path / "run"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    hashes = [
        "'sha256-" + b64encode(sha256(part.encode()).digest()).decode() + "'"
        for part in parts.scripts
    ]
    assert f"script-src {' '.join(hashes)};" in policy
    assert parts.scripts == [(STATIC / name).read_text() for name in script_names()]
    assert (
        "'sha256-" + b64encode(sha256(parts.styles[0].encode()).digest()).decode() + "'" in policy
    )
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_script_in_the_data_stays_data(tmp_path):
    folder = grow_run(tmp_path / BAD.replace("/", "_"), policy=BAD, epochs=3)
    append(folder, {"type": "HostRolledBack", "host": 0, "epoch": 3, "reason": BAD})
    text, parts, data = report_of(tmp_path, folder)
    assert data["runs"][0]["episodes"][0]["rollbacks"][0]["reason"] == BAD
    assert data["runs"][0]["header"]["policy"] == BAD
    assert len(parts.scripts) == len(script_names())
    assert len(parts.data) == 1
    assert "img" not in parts.tags
    assert "<script>alert" not in text


def test_the_licence_of_what_it_draws_with_comes_along(tmp_path):
    text, _, _ = report_of(tmp_path, grow_run(tmp_path / "run"))
    assert "Permission is hereby granted" in text
    assert "Leon Sorokin" in text


def test_runs_of_one_name_are_told_apart(tmp_path):
    _, _, data = report_of(
        tmp_path, grow_run(tmp_path / "a" / "run"), grow_run(tmp_path / "b" / "run", seeds=(5,))
    )
    assert len({run["header"]["name"] for run in data["runs"]}) == 2


def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for runs in ([tmp_path / "folder"], [grow_run(tmp_path / "run"), tmp_path / "none"], []):
        with pytest.raises(SaveError):
            write_report(runs, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    folder = grow_run(tmp_path / "run")
    write_report([folder], tmp_path / "report.html")
    old = (tmp_path / "report.html").read_bytes()

    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SaveError, match="No space"):
        write_report([folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == old


def test_a_report_replaces_an_older_one(tmp_path):
    folder, out = grow_run(tmp_path / "run"), tmp_path / "report.html"
    write_report([folder], out)
    first = out.read_bytes()
    append(folder, {"type": "HostRolledBack", "host": 0, "epoch": 3, "reason": "again"})
    write_report([folder], out)
    assert out.read_bytes() != first


def test_a_report_is_never_written_over_a_runs_events(tmp_path, capsys):
    folder = grow_run(tmp_path / "run")
    events = folder / "events-0.jsonl"
    before = events.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--out", str(events)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "only a report of esper report is replaced" in said
    assert events.read_bytes() == before


@pytest.mark.parametrize("put", ["link", "pipe", "folder", "page"])
def test_a_report_is_written_over_nothing_but_a_report(tmp_path, put):
    folder, out = grow_run(tmp_path / "run"), tmp_path / "out.html"
    (tmp_path / "mine").write_text("mine")
    {
        "link": lambda: out.symlink_to(tmp_path / "mine"),
        "pipe": lambda: os.mkfifo(out),
        "folder": out.mkdir,
        "page": lambda: out.write_text("<!doctype html><title>mine</title>"),
    }[put]()
    before = out.lstat()
    with pytest.raises(SaveError, match=r"out\.html is .* and stays as it is.*another path"):
        write_report([folder], out)
    assert (out.lstat().st_ino, out.lstat().st_size) == (before.st_ino, before.st_size)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_running_run_can_be_reported_on(tmp_path):
    folder = grow_run(tmp_path / "run", epochs=2)
    with open(folder / "events-0.jsonl", "a") as file:
        file.write('{"type": "Grown')
    _, _, data = report_of(tmp_path, folder)
    assert data["runs"][0]["header"]["status"] == "stopped"
    assert data["standings"] == []


def test_the_command_of_a_run_and_the_settings_that_it_shows_do_it_again(tmp_path, monkeypatch):
    config = RunConfig.of(
        {"task": {"name": "digits", "batch": 8, "slots": ["r0c0"]}, "policy": "heuristic:share=0.5"}
    )
    text, _ = reproduce({"command": "run", **config.model_dump(mode="json")}, "run")
    command, _, settings = text.partition("\n\nconfig.json:\n")
    (tmp_path / "config.json").write_text(settings)
    monkeypatch.chdir(tmp_path)
    taken = []
    monkeypatch.setattr(run, "run_policy", lambda config, *rest: taken.append(config))
    with pytest.raises(SystemExit):
        main(shlex.split(command, comments=True)[1:])
    assert taken == [config.model_copy(update={"out": Path("runs/again")})]


def test_the_configuration_of_a_taught_policy_is_there_to_be_saved():
    config = config_of("ppo")
    command, advice = reproduce(config, "ppo")
    assert "esper ppo --config-json config.json" in command
    assert json.loads(command.split("config.json:\n")[1]) == config
    assert "config.json" in advice


def test_a_long_configuration_is_told_whole(tmp_path):
    config = {
        "task": {"name": "digits"},
        "ppo": {f"setting {number}": number for number in range(500)},
    }
    folder = ppo_run(tmp_path / "run")
    (folder / "config.json").write_text(json.dumps(config))
    _, _, data = report_of(tmp_path, folder)
    command = "\n".join(data["runs"][0]["command"])
    assert json.loads(command.split("config.json:\n")[1]) == config


def test_the_command_again_has_every_digit_and_no_endless_depth():
    deep = 1
    for _ in range(5000):
        deep = [deep]
    text, _ = reproduce({"ppo": {"lr": 0.000312345678}, "deep": deep, "none": float("nan")}, "ppo")
    assert '"lr": 0.000312345678' in text
    assert "NaN" not in text
