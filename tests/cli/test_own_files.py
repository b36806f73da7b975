"""`esper --import FILE`:

what a user's own file brings in, in every command, after a resume and in every process.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from cli.test_cli import call
from esper.kasmina.blueprints import REGISTRY
from esper.leyline.imports import IMPORTED
from esper.runtime.tasks.registry import TASKS
from esper.simic.rewards import FAMILIES, TERMS
from esper.storage import runfolder
from esper.tamiyo.rules import RULES
from simic.team_workers import assert_ended_well, esper, run_ranks

KNOWN = (IMPORTED, TASKS, RULES, TERMS, FAMILIES, REGISTRY._known)
SPIRALS = '''
import torch
from dataclasses import dataclass
from torch import nn
from torch.utils.data import TensorDataset

import esper


def spirals(count, seed):
    turn, label = torch.rand(count, generator=torch.Generator().manual_seed(seed)), torch.arange(count) % 2
    angle = 6 * turn + 3.14 * label
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None], label)


def tower():
    return nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2))


data = spirals(200, 0), spirals(60, 1)
esper.register_task(
    esper.task_from_datasets("spirals", *data, tower, classes=2, slots=("0",), batch=32, epochs=3, budget=20.0)
)


@esper.rule("wait")
@dataclass(frozen=True)
class Wait:
    """Waits for good."""

    facts: esper.HostFacts
    steps: tuple[int, ...] = (1, 2)

    def choose(self, masks, reports, memory, signals):
        return self.decided, memory

    decided = (0, 0, 0, 0)


@esper.rule("rash")
@dataclass(frozen=True)
class Rash(Wait):
    decided = (2, 0, 0, 0)


@esper.rule("lost")
@dataclass(frozen=True)
class Lost(Wait):
    decided = (1, 7, 1, 0)


@esper.blueprint("vector", "thin")
def thin(channels):
    return nn.Linear(channels, channels)


@esper.reward_term
def accuracy_itself(facts):
    """What the host gets right."""
    return facts.accuracy


esper.reward_family("plain", {"accuracy_itself": 2.0})
'''
TINY = ["--task", "spirals", "--hosts", "1", "--rounds", "1", "--set", "host_pool=1"]
RUN = ["run", "--task", "spirals", "--policy", "wait:steps=3+4"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of one's own; nothing of it is left when the test is over."""
    before, modules = [dict(known) for known in KNOWN], set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_spirals.py").write_text(SPIRALS)
    yield tmp_path / "my_spirals.py"
    for known, kept in zip(KNOWN, before, strict=True):
        known.clear()
        known.update(kept)
    for name in ("my_spirals", "my_fault"):
        if name in sys.modules and name not in modules:
            del sys.modules[name]


def forget(name="my_spirals"):
    """As in a process that has not imported it."""
    del sys.modules[name]
    for known in KNOWN:
        for key in [
            key for key in known if key in ("my_spirals.py", "spirals", "wait", "rash", "lost")
        ]:
            del known[key]
    for known, key in (
        (REGISTRY._known, ("vector", "thin")),
        (TERMS, "accuracy_itself"),
        (FAMILIES, "plain"),
    ):
        del known[key]


def test_everything_that_it_enters_is_listed(capsys, file):
    code, out, err = call(capsys, "--import", str(file), "list", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {"name": "spirals", "host_parameters": 114, "is_there": True}.items() <= found["tasks"][
        -1
    ].items()
    assert found["rules"]["wait"] == "Waits for good."
    assert found["blueprints"]["thin"] == "for vector"
    assert found["reward terms"]["accuracy_itself"] == "What the host gets right."
    assert found["reward families"]["plain"] == "2 accuracy_itself"


def test_a_policy_is_trained_on_a_task_and_for_a_reward_of_ones_own_and_its_run_needs_the_file(
    capsys, file, tmp_path
):
    out = tmp_path / "run"
    rewarded = ["--reward-family", "plain", "--out", str(out)]
    assert call(capsys, "--import", str(file), "ppo", *TINY, *rewarded)[0] == 0
    saved = runfolder.read_json(out / runfolder.CONFIG)
    assert list(saved["imports"]) == ["my_spirals.py"]
    forget()
    code, _, err = call(capsys, "ppo", "--out", str(out), "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert "esper --import my_spirals.py" in err
    assert (
        call(capsys, "--import", str(file), "ppo", "--out", str(out), "--resume", "--rounds", "2")[
            0
        ]
        == 0
    )
    file.write_text(SPIRALS + "# changed")
    code, _, err = call(
        capsys, "--import", str(file), "ppo", "--out", str(out), "--resume", "--rounds", "3"
    )
    assert code == 2
    assert re.search(r"my_spirals.py .*--out", err)


CHOICES = {"rash": r"\(2, 0, 0, 0\).* r0c0", "lost": "slot index 7"}


@pytest.mark.parametrize("arm", CHOICES)
@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_op_that_is_not_possible_names_arm_and_host(capsys, file, tmp_path, command, arm):
    policy = ["--policy", arm] if command == "run" else ["--policies", "never", arm, "--seeds", "1"]
    arguments = [
        command,
        "--task",
        "spirals",
        *policy,
        "--seed",
        "5",
        "--out",
        str(tmp_path / "run"),
    ]
    code, _, err = call(capsys, "--import", str(file), *arguments)
    assert code == 2
    assert re.search(f"arm '{arm}', host 0 .* 5.*, epoch 1: .*{CHOICES[arm]}", err)


def test_a_rule_of_ones_own_has_settings_and_a_run_that_is_resumed_knows_it(capsys, file, tmp_path):
    arguments = ["--import", str(file), *RUN, "--out", str(tmp_path / "run")]
    assert call(capsys, *arguments)[0] == 0
    assert call(capsys, *arguments, "--resume")[0] == 0
    assert call(capsys, *arguments[:-3], "wait:steps=a", "--out", str(tmp_path / "other"))[0] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import esper\n\nx = 1 / 0\n", r"line 3 \(x = 1 / 0\) .*ZeroDivisionError"),
        ("x = (\n", "SyntaxError.*line 1"),
        ("raise SystemExit('enough')\n", "line 1 .*SystemExit: enough"),
        (
            "import esper\nesper.reward_family('loss', {})\n",
            "line 2 .*NameTakenError: reward family 'loss'",
        ),
        ("import no_such_module\n", "line 1 .*ModuleNotFoundError.*no_such_module"),
    ],
)
def test_a_file_that_fails_is_one_line_with_the_line_of_the_file(capsys, file, text, said):
    fault = file.with_name("my_fault.py")
    fault.write_text(text)
    code, out, err = call(capsys, "--import", str(fault), "runs", str(file.parent))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(f"my_fault.py: .*{said}", err)


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone.py", "no such file"), ("json.py", "json .*another"), ("gone.no", "gone.no")],
)
def test_what_cannot_be_imported_is_one_line(capsys, monkeypatch, file, name, said):
    monkeypatch.chdir(file.parent)
    Path("json.py").write_text("")
    code, out, err = call(capsys, "--import", name, "list")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(said, err)


@pytest.mark.parametrize(
    ("text", "said"), [("x = 1 / 0\n", "ZeroDivision"), ("import no_such\n", "named 'no_such'")]
)
def test_a_package_that_fails_is_told_apart_from_one_that_is_not_there(
    capsys, monkeypatch, file, text, said
):
    monkeypatch.chdir(file.parent)
    Path("my_failing").mkdir()
    Path("my_failing/__init__.py").write_text(text)
    Path("my_failing/rules.py").write_text("")
    code, out, err = call(capsys, "--import", "my_failing.rules", "list")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("name", ["start", "oracle", "never"])
def test_names_of_controls_cannot_be_taken(capsys, monkeypatch, file, name):
    monkeypatch.chdir(file.parent)
    Path("my_start.py").write_text(f'import esper\n\nesper.rule("{name}")(len)\n')
    code, out, err = call(capsys, "--import", "my_start.py", "list")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"called '{name}'" in err


def test_a_host_that_cannot_be_built_without_memory_is_listed_with_the_reason(
    capsys, monkeypatch, file
):
    monkeypatch.chdir(file.parent)
    lines = [
        "import esper, torch",
        "data = [(torch.zeros(2), 0)] * 9",
        "host = lambda: torch.ones(1).item()",
    ]
    lines += ["esper.register_task(esper.task_from_datasets('strict', data, data, host, 2))", ""]
    Path("my_strict.py").write_text("\n".join(lines))
    code, out, err = call(capsys, "--import", "my_strict.py", "list")
    TASKS.pop("strict")
    assert (code, err) == (0, "")
    assert "strict: its host cannot be built" in out


def test_no_policy_at_all_is_refused(capsys, tmp_path):
    code, out, err = call(
        capsys, "compare", "--task", "blobs", "--policies", "", "--out", str(tmp_path / "out")
    )
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_module_is_imported_by_name_from_the_folder_one_is_in_and_only_once(
    capsys, monkeypatch, file
):
    monkeypatch.chdir(file.parent)
    assert call(capsys, "--import", "my_spirals", "--import", "my_spirals.py", "runs", ".")[0] == 0
    assert "spirals" in TASKS
    assert set(IMPORTED) == {"my_spirals", "my_spirals.py"}


@pytest.mark.ranks
def test_every_rank_imports_it(file, tmp_path):
    arguments = [
        "--import",
        str(file),
        "ppo",
        *TINY,
        "--hosts",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    assert_ended_well(run_ranks(tmp_path / "ranks", 2, lambda rank: esper(arguments)))
