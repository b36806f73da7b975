"""Decisions per second on one core, in several versions of Esper at equal actions, interleaved.

    git worktree add /tmp/before 8d1cd916
    python benchmarks/decisions.py --trees before=/tmp/before/src now=src --name lifecycle --out benchmarks/results/decisions.json

8d1cd916 is before the open-ended probation (run `lifecycle`), f8b7882b before rewards read what an
episode leaves (run `rewards`).

Each version has a process of its own and all share one core. They take turns, episode by episode,
and play a fixed script of ops; a network policy is asked for every decision and its answer is left
aside. So every version trains the same networks, which `same_losses` confirms. An episode's last
step is timed apart, since what is measured once more at the end falls into it: the ledger's phase
`closing`, in versions that have it. The script `waiting` leaves two seeds on probation to the end:
measuring them every epoch is the phase `counterfactual`, beside that of the script `deciding`.
There losses differ in the last step, where a version leaves out what is undecided. Seconds are CPU
seconds of the process, so that other work on the machine counts little; those of the ledger's
phases are the wall clock's.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS: dict[str, dict[int, tuple[str, int, str | None]]] = {
    "deciding": {
        1: ("GERMINATE", 0, "conv_small"),
        2: ("GERMINATE", 1, "bottleneck"),
        3: ("FOSSILIZE", 0, None),
        4: ("FOSSILIZE", 1, None),
        6: ("GERMINATE", 0, "norm"),
        8: ("CULL", 0, None),
        9: ("GERMINATE", 1, "norm"),
        11: ("FOSSILIZE", 1, None),
    },
    "waiting": {1: ("GERMINATE", 0, "conv_small"), 2: ("GERMINATE", 1, "bottleneck")},
}
"""Ops by decision: what, in which slot, and which blueprint."""
OPS = ("WAIT", "GERMINATE", "CULL", "FOSSILIZE")


# -- one version, in a process of its own ----------------------------------------------------------


class Player:
    """Plays episodes of `digits` by a script; it uses only what all versions have."""

    def __init__(self, hosts: int, folder: str):
        from dataclasses import replace

        import torch

        from esper.runtime.tasks.registry import get_task
        from esper.simic.environment import GrowthVectorEnv
        from esper.tamiyo.policies import NetworkPolicy
        from esper.tamiyo.policy_files import Layout

        torch.set_num_threads(1)
        torch.manual_seed(0)
        task = replace(get_task("digits"), epochs=16, epoch_examples=512)
        self.env = GrowthVectorEnv(task, hosts, host_seeds=range(hosts), folder=folder)
        self.policy = NetworkPolicy(self._layout(Layout).build())

    def _layout(self, kind: Any) -> Any:
        """The layout of the policy, as the version asks for it."""
        return (
            self.env.layout_of(64, 32)
            if hasattr(self.env, "layout_of")
            else kind.of(self.env.space, True, 64, 32)
        )

    def play(self, script: str) -> dict[str, Any]:
        """One episode of every host: CPU seconds of its steps, its losses and its costs."""
        env = self.env
        obs, info = env.reset(seed=0, options={"episodes": 0})
        memory = None
        seconds = []
        losses = []
        for number in range(env.task.epochs - 1):
            choice = self._choice(SCRIPTS[script].get(number))
            started = time.process_time()
            _, memory = self.policy.decide(obs, info["action_mask"], info["reports"], memory)
            obs, _, _, _, info = env.step([choice] * env.num_envs)
            seconds.append(time.process_time() - started)
            losses.append(env.loss.tolist())
        phases = env.population.runs[0].ledger.phases
        return {
            "seconds": seconds,
            "losses": losses,
            "flops": {name: cost.flops for name, cost in phases.items()},
            "phase_seconds": {name: cost.seconds for name, cost in phases.items()},
        }

    def _choice(self, op: tuple[str, int, str | None] | None) -> tuple[int, int, int, int]:
        if op is None:
            return 0, 0, 0, 0
        name, slot, blueprint = op
        index = 0 if blueprint is None else self.env.space.blueprint_index(blueprint)
        return OPS.index(name), slot, index, 0


def answer(hosts: int) -> None:
    """Play an episode for each line of standard input, which names the script."""
    with tempfile.TemporaryDirectory() as folder:
        player = Player(hosts, folder)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(player.play(line.strip())), flush=True)


# -- all versions ----------------------------------------------------------------------------------


class Version:
    """A source tree with its process."""

    def __init__(self, name: str, tree: Path, hosts: int):
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--answer", str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.episodes: dict[str, list[dict[str, Any]]] = {script: [] for script in SCRIPTS}
        self._read()

    def play(self, script: str, counts: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{script}\n")
        self.process.stdin.flush()
        episode = self._read()
        if counts:
            self.episodes[script].append(episode)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; what it says is above.")
        return json.loads(line)


def describe(version: Version, first: Version, script: str, hosts: int) -> dict[str, Any]:
    """Decisions per second of a version, and how they stand to the first one, turn by turn."""
    episodes = version.episodes[script]
    others = first.episodes[script]
    ratios = [
        sum(other["seconds"][:-1]) / sum(episode["seconds"][:-1])
        for episode, other in zip(episodes, others, strict=True)
    ]
    speeds = [
        hosts * len(episode["seconds"][:-1]) / sum(episode["seconds"][:-1]) for episode in episodes
    ]
    decisions = len(episodes[0]["seconds"])
    return {
        "decisions_per_s": statistics.median(speeds),
        f"of_the_speed_of_{first.name}": quartiles(ratios),
        "last_step_ms_per_host": 1e3
        * statistics.median(episode["seconds"][-1] for episode in episodes)
        / hosts,
        "same_losses": episodes[0]["losses"] == others[0]["losses"],
        "mflops_per_decision": {
            name: flops / decisions / 1e6 for name, flops in episodes[0]["flops"].items() if flops
        },
        "wall_ms_per_decision": {
            name: 1e3 * statistics.median(e["phase_seconds"][name] for e in episodes) / decisions
            for name, spent in episodes[0]["phase_seconds"].items()
            if spent
        },
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def main() -> None:
    from hardware import hardware
    from records import add_options, claim, keep

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", nargs="+", metavar="NAME=PATH", default=["now=src"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=30, help="episodes of each version and script")
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trees = dict(text.split("=", 1) for text in options.trees)
    versions = [Version(name, Path(tree), options.hosts) for name, tree in trees.items()]
    for turn, script in itertools.product(range(options.turns + 1), SCRIPTS):
        order = versions if turn % 2 else versions[::-1]
        for version in order:
            version.play(script, counts=turn > 0)  # the first episodes allocate
    for version in versions:
        version.close()
    record: dict[str, Any] = {
        "script": "benchmarks/decisions.py",
        "command": f"python benchmarks/decisions.py --trees {' '.join(options.trees)}",
        "hardware": hardware("cpu"),
        "hosts": options.hosts,
        "turns": options.turns,
        "scripts": {},
    }
    for script in SCRIPTS:
        record["scripts"][script] = {
            version.name: describe(version, versions[0], script, options.hosts)
            for version in versions
        }
    print(json.dumps(record, indent=1))
    keep(options, record)


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer(int(sys.argv[sys.argv.index("--answer") + 1]))
    else:
        main()
