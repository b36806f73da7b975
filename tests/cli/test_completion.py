"""What a shell completes after `esper`, and that it does not wait for torch."""

import os
import subprocess
import sys

import pytest

ASK = """
import sys
sys.argv[0] = "esper"
from esper.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def complete(words):
    """What bash is told, and whether torch was loaded for it."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    environment = {**os.environ, **asked, "_ESPER_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stdout.split(), done.stderr.strip() == "True"


@pytest.mark.parametrize(
    ("words", "offered"),
    [("esper ru", ["run", "runs"]), ("esper doc", ["doctor"]), ("esper data fe", ["fetch"])],
)
def test_commands_are_completed_without_torch(words, offered):
    assert complete(words) == (offered, False)


def test_options_of_a_configured_command_are_completed():
    offered, _ = complete("esper run --ta")
    assert offered == ["--task"]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["table", "nowhere"]])
def test_what_needs_no_network_loads_no_torch(arguments):
    command = [sys.executable, "-c", ASK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "False"
