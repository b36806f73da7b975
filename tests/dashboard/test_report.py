"""One file that tells everything, runs nothing that it was not built with, and is never half written."""

import json
import os
import re
import shlex
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from typer.main import get_command

from dashboard.web_runs import append, config_of, grow_run, ppo_run
from esper import __version__
from esper.cli import app as cli
from esper.dashboard.report import reproduce, write_report
from esper.leyline.errors import SaveError

BAD = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> &amp;"


class Parts(HTMLParser):
    """Scripts, styles and addresses of a page, as a browser's parser finds them."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.styles, self.addresses, self.tags, self._open = [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self._open = {"script": self.scripts, "style": self.styles}.get(tag)

    def handle_data(self, data):
        if self._open is not None:
            self._open.append(data)

    def handle_endtag(self, tag):
        self._open = None


def report_of(tmp_path, *runs):
    write_report(runs, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    parts = Parts(text)
    return text, parts, json.loads(parts.scripts[1])


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
    hashes = ["'sha256-" + b64encode(sha256(part.encode()).digest()).decode() + "'" for part in parts.scripts]
    assert f"script-src {hashes[0]} {hashes[2]};" in policy
    assert "'sha256-" + b64encode(sha256(parts.styles[0].encode()).digest()).decode() + "'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_script_in_the_data_stays_data(tmp_path):
    folder = grow_run(tmp_path / BAD.replace("/", "_"), policy=BAD, epochs=3)
    append(folder, {"type": "HostRolledBack", "host": 0, "epoch": 3, "reason": BAD})
    text, parts, data = report_of(tmp_path, folder)
    assert data["runs"][0]["episodes"][0]["rollbacks"][0]["reason"] == BAD
    assert data["runs"][0]["header"]["policy"] == BAD
    assert len(parts.scripts) == 3
    assert "img" not in parts.tags
    assert "<script>alert" not in text


def test_the_licence_of_what_it_draws_with_comes_along(tmp_path):
    text, _, _ = report_of(tmp_path, grow_run(tmp_path / "run"))
    assert "Permission is hereby granted" in text
    assert "Leon Sorokin" in text


def test_runs_of_one_name_are_told_apart(tmp_path):
    _, _, data = report_of(tmp_path, grow_run(tmp_path / "a" / "run"), grow_run(tmp_path / "b" / "run", seeds=(5,)))
    assert len({run["header"]["name"] for run in data["runs"]}) == 2


def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for runs in ([tmp_path / "folder"], [grow_run(tmp_path / "run"), tmp_path / "none"], []):
        with pytest.raises(SaveError):
            write_report(runs, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    folder = grow_run(tmp_path / "run")
    (tmp_path / "report.html").write_text("the old one")

    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SaveError, match="No space"):
        write_report([folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "the old one"


def test_a_running_run_can_be_reported_on(tmp_path):
    folder = grow_run(tmp_path / "run", epochs=2)
    with open(folder / "events-0.jsonl", "a") as file:
        file.write('{"type": "Grown')
    _, _, data = report_of(tmp_path, folder)
    assert data["runs"][0]["header"]["status"] == "stopped"
    assert data["standings"] == []


def test_the_command_of_a_grown_run_is_one_that_esper_grow_takes():
    task = {"name": "digits", "epochs": 6, "slots": ["r0c0", "r0c1"], "budget": 1.5}
    command, _ = reproduce(config_of("grow", task=task, policy="a file; rm -rf /", deterministic=True), "grow")
    line = shlex.split(command, comments=True)
    assert line[:2] == ["esper", "grow"]
    assert line[line.index("--policy") + 1] == "a file; rm -rf /"
    assert line[line.index("--slots") + 1 :][:2] == ["r0c0", "r0c1"]
    assert "--deterministic" in line
    known = {option for parameter in get_command(cli.app).commands["grow"].params for option in parameter.opts}
    assert {word for word in line if word.startswith("--")} <= known


def test_what_the_command_line_cannot_say_is_said():
    _, advice = reproduce(config_of("grow", task={"name": "digits", "batch": 8}), "grow")
    assert "task.batch = 8" in advice


def test_the_configuration_of_a_taught_policy_is_there_to_be_saved():
    config = config_of("ppo")
    command, advice = reproduce(config, "ppo")
    assert "esper ppo --config-json config.json" in command
    assert json.loads(command.split("config.json:\n")[1]) == config
    assert "config.json" in advice
