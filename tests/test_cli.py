"""The `esper` command: what it prints, how it exits, and that a mistake is one line without a traceback."""

import subprocess
import sys

import pytest

import esper
from esper.cli import main
from esper.leyline.errors import DataError


def call(capsys, *arguments):
    """Exit code, standard output and standard error of one call."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    streams = capsys.readouterr()
    return leaving.value.code or 0, streams.out, streams.err


def test_the_version_is_the_packages(capsys):
    assert call(capsys, "--version") == (0, f"esper {esper.__version__}\n", "")


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "esper", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"esper {esper.__version__}\n")


def test_without_a_command_the_help_is_shown(capsys):
    _, out, err = call(capsys)
    assert "demo" in out + err


@pytest.mark.parametrize("arguments", [["demo", "--epochs", "7"], ["demo", "--speed", "9"], ["dmeo"], ["--fast"]])
def test_a_bad_option_is_exit_code_two(capsys, arguments):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in out + err


def test_the_demo_grows_a_network_and_prints_the_comparison(capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call(capsys, "demo", "--epochs", "8")
    assert code == 0
    for part in ("host alone", "GERMINATE", "never", "heuristic", "test accuracy", "Next: esper.grow"):
        assert part in out


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_code_two(capsys, monkeypatch):
    def fail():
        raise DataError("the digits are gone. Put them back.")

    monkeypatch.setattr("esper.runtime.data.load_digits", fail)
    code, out, err = call(capsys, "demo")
    assert (code, err) == (2, "esper: the digits are gone. Put them back.\n")
    assert "Traceback" not in out


def test_an_error_that_is_not_the_users_is_not_hidden(monkeypatch):
    monkeypatch.setattr("esper.runtime.data.load_digits", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])
