"""The `esper` command:

what it prints, how it exits, and that a mistake is one line without a traceback.
"""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import esper
from esper.cli import app as cli
from esper.cli import main
from esper.cli import run as running
from esper.cli.options import HOSTS
from esper.leyline.configuration import leaves
from esper.leyline.errors import DataError
from esper.runtime.tasks.fetch import SOURCES
from esper.runtime.tasks.registry import TASKS


def call(capsys, *arguments):
    """Exit code, standard output and standard error of one call."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    streams = capsys.readouterr()
    return leaving.value.code or 0, streams.out, streams.err


def options_of(command):
    """A command's options, those that its configuration gives included."""
    found = get_command(cli.app).commands[command]
    parameters = found.get_params(found.make_context(command, []))
    return {
        option: parameter
        for parameter in parameters
        for option in parameter.opts
        if option != "--help"
    }


def test_the_version_is_the_packages(capsys):
    assert call(capsys, "--version") == (0, f"esper {esper.__version__}\n", "")


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "esper", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"esper {esper.__version__}\n")


def test_the_help_fits_on_one_screen_and_names_every_command_in_its_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, "--help")
    lines = out.splitlines()
    assert (code, len(lines) <= 24, max(map(len, lines)) <= 80) == (0, True, True)
    commands = get_command(cli.app).commands
    assert {line.split()[0] for line in lines if line.startswith("  ")} == {*commands, "Grow"}
    assert [line for line in lines if line.isalpha()] == ["Train", "Compare", "Look", "Data"]
    assert all(len(command.get_short_help_str(100)) < 60 for command in commands.values())


@pytest.mark.parametrize("name", ["ppo", "run", "compare"])
def test_options_have_the_help_of_their_fields_and_every_list_takes_spaces(name):
    module = import_module(f"esper.cli.{name}")
    start = module.CONFIG.start()
    for option, key in module.OPTIONS.items():
        parameter = options_of(name)[option]
        assert len(parameter.help) < 60, option
        if "=" not in key:
            about = leaves(type(start))[key].description.replace("`", "")
            assert parameter.help.lower() == f"{about.lower()}."
            assert parameter.multiple == ("tuple" in str(leaves(type(start))[key].annotation))
            default = start.value(key)
            assert parameter.default == (
                (list(default or ()) or None) if parameter.multiple else default
            )


@pytest.mark.parametrize(
    "options", [HOSTS, {"--set", "--preset", "--config-json", "--resume", "--json"}]
)
def test_the_same_things_have_the_same_names_in_all_commands(options):
    for name in ("ppo", "run", "compare"):
        assert set(options) <= set(options_of(name))


def test_without_a_command_it_greets_and_shows_three_next_steps(capsys):
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    assert out.startswith(f"Esper {esper.__version__} grows neural networks")
    steps = [line for line in out.splitlines() if re.match(r"  \d\. ", line)]
    assert len(steps) == 3
    commands = get_command(cli.app).commands
    for step, command in zip((steps[0], steps[2]), ("demo", "doctor"), strict=True):
        assert step.endswith(f"esper {command}")
        assert command in commands
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["demo", "--epochs", "7"], ["demo", "--speed", "9"], ["dmeo"], ["--fast"]]
)
def test_a_bad_option_is_exit_code_two(capsys, arguments):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in out + err


@pytest.fixture
def quick_digits(monkeypatch, tmp_path):
    """The digits with a few training steps per epoch, in a folder of the test's own."""
    pytest.importorskip("sklearn")
    monkeypatch.setitem(TASKS, "digits", replace(TASKS["digits"], epoch_examples=512, held_out=64))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arms_in(out):
    """First cells of the rows of all tables."""
    return [line.split()[1] for line in out.splitlines() if line.startswith("│")]


def test_the_demo_grows_a_network_prints_one_comparison_and_exports_it(capsys, quick_digits):
    code, out, err = call(capsys, "demo", "--epochs", "8", "--seed", "2")
    assert (code, err) == (0, "")
    assert arms_in(out) == ["never", "heuristic"]
    for part in (
        "the host alone",
        "GERMINATE",
        "digits, seed 2",
        "validation",
        "kept",
        "Next: esper run",
    ):
        assert part in out
    for name in ("never", "heuristic", "exported"):
        assert f"runs/demo/{name}" in out
    for policy in ("never", "heuristic"):
        run = quick_digits / "runs" / "demo" / policy
        (result,) = json.loads((run / "results.json").read_text())["results"]
        assert (result["arm"], result["seed"], result["epochs"]) == (policy, 2, 8)
    for name in ("grown.py", "weights.safetensors"):
        assert (run.parent / "exported" / name).read_bytes() == (
            run / "networks" / "host-0" / name
        ).read_bytes()


@pytest.mark.slow
def test_the_demo_takes_a_fresh_folder_every_time(capsys, quick_digits):
    for folder in ("mine/demo", "mine/demo-3"):
        code, out, _ = call(capsys, "demo", "--epochs", "8", "--out", "mine/demo")
        assert code == 0
        assert re.search(f"{folder}/never .*{folder}/heuristic", out)
        assert sorted(path.name for path in (quick_digits / folder).iterdir()) == [
            "exported",
            "heuristic",
            "never",
        ]
        (quick_digits / "mine" / "demo-2").mkdir(exist_ok=True)


def test_the_arms_of_the_demo_have_the_same_host_and_data(capsys, quick_digits):
    """Nothing is decided before the first epoch is over, so its readings are the same."""
    call(capsys, "demo", "--epochs", "8")
    first = []
    for policy in ("never", "heuristic"):
        lines = (quick_digits / "runs/demo" / policy / "events-0.jsonl").read_text().splitlines()
        first.append(next(row for row in map(json.loads, lines) if row["type"] == "HostEpoch"))
    assert first[0] == first[1]


def test_the_demo_stops_when_it_is_asked_to(capsys, monkeypatch, quick_digits):
    monkeypatch.setattr(running, "stop_on_signals", lambda: nullcontext(lambda: True))
    code, out, _ = call(capsys, "demo", "--epochs", "8")
    assert code == 130
    assert "Continue with: esper run --out runs/demo/never --resume" in out
    assert arms_in(out) == []


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_the_demo_does_not_take_a_folder_that_is_not_its_own(capsys, quick_digits, out):
    code, _, err = call(capsys, "demo", "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "runs/demo" in err
    assert list(quick_digits.iterdir()) == []


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_two(capsys, monkeypatch, tmp_path):
    def fail(root):
        raise DataError("the digits are gone. Put them back.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "digits", replace(TASKS["digits"], load=fail))
    code, out, err = call(capsys, "demo")
    assert (code, err) == (2, "esper: the digits are gone. Put them back.\n")
    assert "Traceback" not in out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_error_that_is_not_the_users_is_not_hidden(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "digits", replace(TASKS["digits"], load=lambda root: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


# -- tasks and data --------------------------------------------------------------------------------


@pytest.fixture
def a_text(tmp_path, monkeypatch):
    """A data folder in which one of the data sets is, and one is broken."""
    monkeypatch.delenv("ESPER_DATA", raising=False)
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/input.txt").write_bytes(b"To be, or not to be. " * 1000)
    (tmp_path / "TinyStories").mkdir()
    for part in ("train", "valid"):
        (tmp_path / f"TinyStories/TinyStories-{part}.txt").write_bytes(
            b"Once upon a time, and so on, short."
        )
    return tmp_path


def test_tasks_are_listed_with_their_sizes_and_whether_they_are_there(capsys, monkeypatch, a_text):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = call(capsys, "list", "--data-root", str(a_text))
    assert (code, err) == (0, "")
    lines = {
        name: next(line for line in out.splitlines() if line.strip().startswith(f"{name} "))
        for name in TASKS
    }
    assert lines["blobs"].split()[-1] == lines["shakespeare"].split()[-1] == "yes"
    assert lines["cifar10"].split()[-1] == "no"
    assert "6,418" in lines["cifar10"]
    assert "278 +" in lines["shakespeare"]
    assert lines["tinystories"].split()[-1] == "error"
    assert re.search("tinystories: 2 .* 65", out)
    assert "esper data fetch NAME" in out


def test_the_table_of_tasks_fits_a_narrow_terminal(capsys, monkeypatch, a_text):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, "list", "--data-root", str(a_text))
    for whole in (*TASKS, "tinyshakespeare,", "--data-root", "error"):
        assert f" {whole}" in out


def test_tasks_as_json_hold_the_same(capsys, monkeypatch, a_text):
    monkeypatch.setenv("ESPER_DATA", str(a_text))
    code, out, _ = call(capsys, "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)["tasks"]}
    assert code == 0
    assert list(rows) == list(TASKS)
    assert rows["shakespeare"] == {
        "name": "shakespeare",
        "summary": TASKS["shakespeare"].summary,
        "train": 278,
        "validation": 24,
        "host_parameters": 136_448,
        "source": TASKS["shakespeare"].source,
        "is_there": True,
        "problem": None,
        "varies": None,
    }
    assert (rows["cifar10"]["is_there"], rows["cifar10"]["train"], rows["cifar10"]["problem"]) == (
        False,
        None,
        None,
    )
    assert "tokens" in rows["tinystories"]["problem"]


def test_fetching_an_unknown_data_set_names_the_nearest(capsys, tmp_path):
    code, out, err = call(capsys, "data", "fetch", "cifar", "--data-root", str(tmp_path))
    assert (code, out) == (2, "")
    assert re.match("esper: .*'cifar'.*'cifar10'.*blobs, cifar10,", err)
    assert err.count("\n") == 1


def test_fetching_what_is_always_there_says_so(capsys):
    code, out, err = call(capsys, "data", "fetch", "digits")
    assert (code, err) == (0, "")
    assert re.match("digits .*scikit-learn", out)


def test_fetching_without_a_folder_asks_for_one(capsys, monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    code, out, err = call(capsys, "data", "fetch", "shakespeare")
    assert (code, out) == (2, "")
    assert "--data-root or ESPER_DATA" in err


def test_fetching_without_a_network_is_one_line_that_says_what_to_put_where(
    capsys, monkeypatch, tmp_path
):
    nowhere = replace(SOURCES["shakespeare"][0], url="http://127.0.0.1:9/input.txt")
    monkeypatch.setitem(SOURCES, "shakespeare", (nowhere,))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # no waiting between attempts
    code, out, err = call(capsys, "data", "fetch", "shakespeare", "--data-root", str(tmp_path))
    assert (code, out) == (2, "")
    assert re.search(f"http://127.0.0.1:9/input.txt .*{tmp_path}/shakespeare/input.txt", err)
    assert err.count("\n") == 1


def test_the_command_line_loads_no_torch_before_it_needs_it():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, esper.cli; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_the_task_on_the_page_about_data_runs(capsys, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "data.md"
    monkeypatch.setattr(
        "esper.runtime.tasks.registry.TASKS", dict(TASKS)
    )  # so that the page's own entry goes with this test
    exec(
        compile(
            re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1], str(page), "exec"
        ),
        {},
    )
    assert re.findall(r"(\w+), seed (\d): \d+ parameters, test \d", capsys.readouterr().out) == [
        ("never", "0"),
        ("never", "1"),
        ("heuristic", "0"),
        ("heuristic", "1"),
    ]
