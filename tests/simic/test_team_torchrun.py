"""Under torchrun:

what is refused, asked to stop, a rank that dies, and one that is started anew.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from esper.storage import runfolder
from simic.team_workers import assert_ended_well, farthest, free_port, records_of, train_ranks
from simic.tiny_runs import assert_same_end, command, manifest_of

pytestmark = pytest.mark.ranks


def torchrun(arguments, *options, meanwhile=lambda process, mark: None, **environment):
    """torchrun with two ranks: exit code and what was said; whatever is left of it is killed."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    mark = uuid4().hex
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "MARK": mark, **environment}
    place = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *place, *options, "-m", *arguments]
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        meanwhile(process, mark)
        said, _ = process.communicate(timeout=60)
        assert marked(mark) == []
        return process.returncode, said
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def marked(mark):
    """Processes that were started with this mark, whoever is their parent now, and have not
    ended.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_torchrun_names_our_one_line_and_code(tmp_path):
    code, said = torchrun(["esper", *command(tmp_path / "run", hosts=1)])
    assert code == 1
    assert len(re.findall("esper: 1 hosts .*?2 ranks", said)) == 2
    assert "exitcode  : 2" in said
    assert f"{os.sep}esper{os.sep}" not in said.replace(
        str(tmp_path), ""
    )  # no line of a traceback through our files


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_that_is_asked_to_stop_ends_all_ranks_after_the_epoch(number, tmp_path):
    out = tmp_path / "run"

    def ask(process, mark):
        until = time.monotonic() + 40
        while not (out / runfolder.MANIFEST).exists() and time.monotonic() < until:
            time.sleep(0.05)
        for pid in (
            marked(mark) if number == signal.SIGINT else [process.pid]
        ):  # Ctrl-C may reach all of them
            os.kill(pid, number)

    _, said = torchrun(["esper", *command(out, hosts=2, rounds=500)], meanwhile=ask)
    rounds = manifest_of(out)["rounds"]
    assert 1 <= rounds < 500
    assert re.search(f" {rounds} .*esper ppo --out {out} --resume", said)
    assert f"{os.sep}esper{os.sep}" not in said.replace(str(tmp_path), "")


ROUNDS = 3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert_ended_well(train_ranks(out, 2, torch.float32, hosts=2, rounds=ROUNDS))
    return out


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job_and_is_named(tmp_path):
    arguments = ["simic.team_workers", *command(tmp_path / "run", hosts=2, rounds=ROUNDS)]
    code, said = torchrun(arguments, "--max-restarts", "0", DIES="1")
    died = float((tmp_path / "run" / "died").read_text())
    assert code == 1
    assert time.time() - died < 30
    assert "rank      : 1 (local_rank: 1)" in said
    assert "Signal 9 (SIGKILL)" in said
    assert manifest_of(tmp_path / "run")["rounds"] == 1


@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_started_anew_and_the_run_ends_as_if_nothing_was(
    rank, undisturbed, tmp_path
):
    out = tmp_path / "run"
    arguments = ["simic.team_workers", *command(out, hosts=2, rounds=ROUNDS)]
    code, said = torchrun(arguments, "--max-restarts", "1", DIES=rank)
    assert code == 0, said
    assert (out / "died").exists()
    assert_same_end(out, undisturbed)
    assert farthest(records_of(out, 1), records_of(undisturbed, 1))[0] == 0.0
