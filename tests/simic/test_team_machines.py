"""Two machines:

network namespaces joined by a cable that can be cut. They see the same files, as a cluster's do.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from esper.storage import runfolder
from simic.team_workers import assert_ended_well, free_port, train_ranks
from simic.tiny_runs import assert_same_end, command, manifest_of

pytestmark = pytest.mark.ranks

SETTINGS = {"hosts": 2, "rounds": 6}
ADDRESS = "10.201.77.{}"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Names of two namespaces with addresses 1 and 2 on their `cable`."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (Debian: iproute2)")
    names = [f"esper-{os.getpid()}-{place}" for place in range(2)]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ends = "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]
            ip("link", "add", "cable", *ends)
            for place, name in enumerate(names):
                ip("-n", name, "address", "add", ADDRESS.format(place + 1) + "/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"network namespaces may not be made here: {problem.stderr.strip()}")
        yield names


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert_ended_well(train_ranks(out, 2, torch.float32, **SETTINGS))
    return out


@contextmanager
def started(machines, folder, arguments, **environment):
    """The command on both machines; whatever is left of it is killed."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "GLOO_SOCKET_IFNAME": "cable",
        **environment,
    }
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESS.format(1)]
    place += ["--master-port", str(free_port()), "-m", *arguments]
    launcher, runs = [sys.executable, "-m", "torch.distributed.run"], []
    folder.mkdir()
    try:
        for node, name in enumerate(machines):
            whole = ["ip", "netns", "exec", name, *launcher, "--node-rank", str(node), *place]
            with open(folder / f"said-{node}", "w") as said:
                run = subprocess.Popen(
                    whole, env=env, stdout=said, stderr=said, start_new_session=True
                )
            runs.append(run)
        yield runs
    finally:
        for name in machines:
            found = subprocess.run(
                ["ip", "netns", "pids", name], check=True, capture_output=True, text=True
            ).stdout
            for pid in found.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for run in runs:
            run.wait()


def ended(runs, folder, seconds=50):
    """Exit codes, and what was said, on both machines."""
    until = time.monotonic() + seconds
    while any(run.poll() is None for run in runs) and time.monotonic() < until:
        time.sleep(0.05)
    said = [(folder / f"said-{node}").read_text() for node in range(2)]
    assert None not in [run.returncode for run in runs], "\n".join(said)
    return [run.returncode for run in runs], said


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_both_machines_and_the_run_goes_on_when_it_is_back(
    machines, undisturbed, tmp_path
):
    out = tmp_path / "run"
    slowly, again = (
        ["simic.team_workers", *command(out, **SETTINGS)],
        ["esper", "ppo", "--out", str(out), "--resume"],
    )
    with started(machines, tmp_path / "first", slowly, SILENCE="6", SLOW="0.3") as runs:
        until = time.monotonic() + 40
        while not (out / runfolder.MANIFEST).exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        ip("-n", machines[0], "link", "set", "cable", "down")
        try:
            codes, said = ended(runs, tmp_path / "first")
        finally:
            ip("-n", machines[0], "link", "set", "cable", "up")
    assert codes == [1, 1], said
    for rank, text in enumerate(said):
        assert f"esper: rank {rank} lost contact with rank {1 - rank}" in text
        assert "exitcode  : 2" in text
    assert 1 <= manifest_of(out)["rounds"] < SETTINGS["rounds"]
    with started(machines, tmp_path / "second", again) as runs:
        codes, said = ended(runs, tmp_path / "second")
    assert codes == [0, 0], said
    assert_same_end(out, undisturbed)


@pytest.mark.slow
def test_a_network_where_the_others_are_not_is_told_with_what_to_set(machines, tmp_path):
    arguments = ["simic.team_workers", *command(tmp_path / "run", **SETTINGS)]
    with started(
        machines, tmp_path / "wrong", arguments, GLOO_SOCKET_IFNAME="lo", MEETING="3"
    ) as runs:
        codes, said = ended(runs, tmp_path / "wrong")
    assert codes == [1, 1], said
    for rank, text in enumerate(said):
        assert f"esper: rank {rank} " in text
        assert "GLOO_SOCKET_IFNAME=" in text
    assert not (tmp_path / "run").exists()
