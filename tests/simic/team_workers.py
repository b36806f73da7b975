"""Ranks of a team:

forked, so that nothing is imported anew, joined by gloo, and none of them outlives its test.
"""

import faulthandler
import gc
import json
import math
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from esper.cli import main
from esper.leyline.errors import EsperError
from esper.simic import team
from esper.simic.environment import GrowthVectorEnv
from esper.simic.ppo.agent import PPOAgent
from esper.simic.team import joined_team
from esper.storage import runfolder
from esper.tamiyo.policy_files import read as read_policy
from simic.tiny_runs import command, manifest_of

UNTOLD = ("seconds", "first_worst")
"""the clock, and the decision that rounding falls on"""
SHARED = ("RoundBegan", "RankTimed")
"""events that every rank tells"""
CLOSE = 1e-6
FREE = {"hosts": 4, "rounds": 3, "ppo__target_kl": 10.0}
"""no update ends early"""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: 2 is one line of ours, 99 a traceback."""

    code: int
    value: Any
    said: str


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def forked(works, folder):
    """Process ids of forks that each run one of `works`; what is left of them in the end is
    killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pids = {}
    try:
        for place, work in enumerate(works):
            sys.stdout.flush()
            sys.stderr.flush()
            if not (pid := os.fork()):
                _live(work, folder / f"rank-{place}")
            pids[place] = pid
        yield pids
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _live(work, path):
    code = 99
    try:
        sys.stdout = sys.stderr = open(path.with_suffix(".said"), "w", buffering=1)  # noqa: SIM115
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        torch.set_num_threads(1)
        gc.freeze()  # what is collected here is this rank's own
        path.with_suffix(".value").write_bytes(pickle.dumps(work()))
        code = 0
    except EsperError as problem:
        print(f"{type(problem).__name__}: {problem}")
        code = 2
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_ranks(folder, size, work, seconds=40, environments=None):
    """`work(rank)` on `size` ranks at once, and how each of them ended; a rank that takes too long
    is a failure.
    """
    port = free_port()
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def live(rank):
        team._BEAT = timedelta(milliseconds=50)
        faulthandler.dump_traceback_later(
            0.9 * seconds, file=sys.stderr
        )  # where it hangs, should it hang
        if size > 1 or environments:
            os.environ.update({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            os.environ.update((environments or {}).get(rank, {}))
        return work(rank)

    codes, until = {}, time.monotonic() + seconds
    with forked([lambda rank=rank: live(rank) for rank in range(size)], folder) as pids:
        while len(codes) < size and time.monotonic() < until:
            for rank, pid in pids.items():
                if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.01)
    said = {rank: (folder / f"rank-{rank}.said").read_text() for rank in range(size)}
    assert len(codes) == size, (
        f"ranks {sorted(set(range(size)) - codes.keys())} did not end: {said}"
    )
    values = {rank: folder / f"rank-{rank}.value" for rank in range(size)}
    return [
        Ended(
            codes[rank],
            pickle.loads(values[rank].read_bytes()) if not codes[rank] else None,
            said[rank],
        )
        for rank in range(size)
    ]


def assert_ended_well(ended):
    assert [rank.code for rank in ended] == [0] * len(ended), "\n".join(rank.said for rank in ended)


def assert_one_line(ended, text):
    """Every rank ends with one line of ours that holds the pattern `text`."""
    for rank in ended:
        assert rank.code == 2, rank.said
        assert "Traceback" not in rank.said
        told = [line for line in rank.said.splitlines() if line.startswith("esper: ")]
        assert [bool(re.search(text, line)) for line in told] == [True], rank.said


def in_team(work):
    """`work(team)` on every rank."""

    def live(rank):
        with joined_team(wants_cuda=False) as team:
            return work(team)

    return live


# -- training --------------------------------------------------------------------------------------


def esper(arguments):
    """The command; comes back where it ends well."""
    try:
        main(arguments)
    except SystemExit as leaving:
        if leaving.code:
            raise


def train_ranks(
    out, size, dtype=torch.float64, *, resume=False, prepare=lambda rank: None, **changes
):
    """`esper ppo` on `size` ranks; of each, how it ended and what its rollouts were."""

    def live(rank):
        torch.set_default_dtype(dtype)
        prepare(rank)
        seen = note_rollouts()
        esper([*command(out, **changes), *(["--resume"] if resume else [])])
        return seen

    return run_ranks(out.parent / f"{out.name}-ranks-{size}", size, live)


def note_rollouts():
    """A list that gets, of every update of this process, where its rows stand, their type, and what
    was decided.
    """
    seen, update = [], PPOAgent.update

    def noting(agent, rollout, **options):
        types = {
            rollout.states.dtype,
            rollout.rewards.dtype,
            *(p.dtype for p in agent.network.parameters()),
        }
        seen.append({"first": rollout.first, "types": types, "choices": rollout.choices.clone()})
        return update(agent, rollout, **options)

    PPOAgent.update = noting
    return seen


def decisions_of(ended):
    """What was decided for all hosts, round by round: [rounds, T, hosts, heads]."""
    ranks = [rank.value for rank in ended]
    assert [rank[0]["first"] for rank in ranks] == sorted(rank[0]["first"] for rank in ranks)
    return torch.stack(
        [torch.cat([seen["choices"] for seen in row], 1) for row in zip(*ranks, strict=True)]
    )


# -- what a run left behind ------------------------------------------------------------------------


def records_of(out, rank):
    return [
        json.loads(line)
        for line in (Path(out) / runfolder.events_of(rank)).read_text().splitlines()
    ]


def all_records(out):
    ranks = sorted({str(rank) for rank, _ in runfolder.event_files(out)})
    return [row for rank in ranks for row in records_of(out, int(rank))]


def counted(out):
    """How many records of each type there are; one of those that every rank tells."""
    found = Counter(row["type"] for row in all_records(out))
    return {kind: count for kind, count in found.items() if kind not in SHARED}


def hosts_of(out):
    """Round and host -> its events in order, wherever it was played."""
    found, number = {}, None
    for row in all_records(out):
        number = row["round"] if row["type"] == "RoundBegan" else number
        if "host" in row or "env_id" in row:
            found.setdefault((number, row.get("host", row.get("env_id"))), []).append(row)
    return dict(sorted(found.items()))


def rounds_of(out):
    found = [row for row in records_of(out, 0) if row["type"] == "RoundFinished"]
    for row in found:
        worst = row["update"]["first_worst"]
        assert worst is None or abs(worst["ratio"] - 1) < CLOSE
    return found


def sorted_episodes(out):
    """Every epoch of every host, once, wherever it was told."""
    rows = [row for row in all_records(out) if row["type"] == "HostEpoch"]
    return sorted(
        (row["round"], row["host"], row["epoch"], row["held_out_loss"], row["reward"])
        for row in rows
    )


def assigned(out):
    """Round by round, the hosts of each rank."""
    rows = sorted(
        (row["round"], row["rank"], row["hosts"])
        for row in all_records(out)
        if row["type"] == "RankTimed"
    )
    return [
        [hosts for number, _, hosts in rows if number == wanted]
        for wanted in sorted({row[0] for row in rows})
    ]


def tensors_of(out):
    newest = manifest_of(out)["checkpoints"][-1]["file"]
    return read_policy(Path(out) / runfolder.CHECKPOINTS / newest)


def farthest(one, other, path=""):
    """The largest relative difference of two nests of plain values, and where; what is no number
    has to be equal.
    """
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{path}: {one.keys()} and {other.keys()}"
        pairs = [(one[key], other[key], f"{path}.{key}") for key in one if key not in UNTOLD]
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{path}: {len(one)} and {len(other)} entries"
        pairs = [
            (a, b, f"{path}[{place}]") for place, (a, b) in enumerate(zip(one, other, strict=True))
        ]
    elif isinstance(one, float) and isinstance(other, float):
        return (abs(one - other) / max(1.0, abs(one)), path)
    else:
        assert one == other, f"{path}: {one!r} and {other!r}"
        return (0.0, path)
    return max((farthest(*pair) for pair in pairs), default=(0.0, path))


def farthest_tensor(one, other):
    """The largest difference of tensors, over their size where that is above 1; whole numbers have
    to be equal.
    """
    assert one.keys() == other.keys()
    worst = (0.0, "")
    for name, value in one.items():
        if value.dtype.is_floating_point:
            gap = float((value - other[name]).abs().max() / max(1.0, float(value.abs().max())))
            worst = max(worst, (math.inf if math.isnan(gap) else gap, name))
        else:
            assert torch.equal(value, other[name]), name
    return worst


# -- a rank that dies ------------------------------------------------------------------------------


def die_at(rank, step, out):
    """The rank is killed at this step of its hosts, unless it was started anew."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(
            2 * (os.environ["RANK"] == "0")
        )  # the others are there first, among what the dead have left
        return
    real, steps = GrowthVectorEnv.step_async, []

    def stepping(env, actions):
        steps.append(None)
        if len(steps) == step and os.environ["RANK"] == rank:
            (out / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return real(env, actions)

    GrowthVectorEnv.step_async = stepping


def step_slowly(seconds):
    real = GrowthVectorEnv.step_async
    GrowthVectorEnv.step_async = lambda env, actions: (
        time.sleep(seconds * env.num_envs),
        real(env, actions),
    )[1]


if __name__ == "__main__":
    given = sys.argv[1:]
    team._SILENCE = timedelta(seconds=float(os.environ.get("SILENCE", "60")))
    team._MEETING = timedelta(seconds=float(os.environ.get("MEETING", "60")))
    if "DIES" in os.environ:
        die_at(os.environ["DIES"], 5, Path(given[given.index("--out") + 1]))
    if "SLOW" in os.environ:
        step_slowly(float(os.environ["SLOW"]))
    main(given)
