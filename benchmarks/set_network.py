"""How long the growth policy takes to act and to learn, in several versions of Esper, interleaved.

    git worktree add /tmp/before 897b0d34
    python benchmarks/set_network.py --trees before=/tmp/before/src now=src --out benchmarks/results/set_network.json

897b0d34 has the policy for one number of slots and one list of blueprints. Each version has a
process of its own and all share one core. They take turns. Observations and masks are random: of a
network's time only shapes matter. `act` decides for 32 hosts of 8 slots; `update` learns from a
rollout of the preset `digits` (12 hosts, 15 decisions, 2 slots, 8 blueprints, 8 passes of 4
minibatches), with the widths of the preset. Seconds are CPU seconds of the process, so that other
work on the machine counts little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ACTING = {"hosts": 32, "slots": 8, "blueprints": 9}
LEARNING = {"hosts": 12, "slots": 2, "blueprints": 9, "steps": 15}
WIDTHS = {"hidden_dim": 64, "head_dim": 32}
BLENDS = 3


# -- one version, in a process of its own ----------------------------------------------------------


def build(slots: int, blueprints: int) -> Any:
    """The growth policy of a version, for its own observation."""
    import torch

    from esper.tamiyo.network import FactoredRecurrentActorCritic

    torch.manual_seed(0)
    try:
        from esper.tamiyo.layout import ObservationLayout
    except ImportError:  # before there were layouts
        from esper.leyline.slots import SlotConfig
        from esper.tamiyo.observation import feature_names

        width = len(feature_names(SlotConfig.for_grid(1, slots)))
        return FactoredRecurrentActorCritic(width, slots, num_blueprints=blueprints, **WIDTHS)
    layout = ObservationLayout(slots, blueprints)
    return FactoredRecurrentActorCritic(layout.width, slots, layout=layout, **WIDTHS)


def draw_masks(hosts: int, slots: int, blueprints: int) -> dict[str, Any]:
    """Masks of hosts that may do everything."""
    import torch

    shapes = {
        "op": (4,),
        "slot": (4, slots),
        "blueprint": (slots, blueprints),
        "blend": (BLENDS,),
    }
    return {name: torch.ones(hosts, *shape, dtype=torch.bool) for name, shape in shapes.items()}


class Acting:
    """Decides for many hosts, with a memory."""

    def __init__(self) -> None:
        import torch

        hosts, slots, blueprints = ACTING.values()
        self.network = build(slots, blueprints)
        self.states = torch.rand(hosts, self.network.state_dim)
        self.masks = draw_masks(hosts, slots, blueprints)
        self.hidden = self.network.get_initial_hidden(hosts)

    def run(self) -> None:
        """One decision about every host."""
        import torch

        with torch.no_grad():
            self.network.get_action(self.states, self.hidden, self.masks)


class Learning:
    """Learns from one rollout again and again."""

    def __init__(self) -> None:
        import torch

        from esper.simic.ppo.agent import PPOAgent
        from esper.simic.ppo.rollout import Rollout
        from esper.simic.ppo.settings import PPOSettings

        hosts, slots, blueprints, steps = LEARNING.values()
        network = build(slots, blueprints)
        settings = PPOSettings(epochs=8, minibatches=4, target_kl=None, **WIDTHS)
        self.agent = PPOAgent(network, settings)
        masks = draw_masks(hosts, slots, blueprints)
        shapes = {name: tuple(mask.shape[1:]) for name, mask in masks.items()}
        self.rollout = Rollout(steps, hosts, network.state_dim, network.spec, shapes)
        hidden = network.get_initial_hidden(hosts)
        self.rollout.begin(hidden)
        everywhere = torch.ones(hosts, dtype=torch.bool)
        for step in range(steps):
            states = torch.rand(hosts, network.state_dim)
            with torch.no_grad():
                choices, log_probs, values, hidden = network.get_action(states, hidden, masks)
            self.rollout.add_decision(
                states, masks, choices, log_probs, values, everywhere, ~everywhere
            )
            is_last = everywhere if step == steps - 1 else ~everywhere
            self.rollout.add_outcome(torch.randn(hosts), is_last, ~everywhere)
        self.rollout.finish(torch.zeros(hosts), hidden)

    def run(self) -> None:
        """One update."""
        self.agent.update(self.rollout)


def answer() -> None:
    """Do what each line of standard input names, so often; print CPU seconds of one."""
    import torch

    torch.set_num_threads(1)
    works = {"act": Acting(), "update": Learning()}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        started = time.process_time()
        for _ in range(int(count)):
            works[name].run()
        print(json.dumps((time.process_time() - started) / int(count)), flush=True)


# -- all versions ----------------------------------------------------------------------------------


class Version:
    """A source tree with its process."""

    def __init__(self, name: str, tree: Path):
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.seconds: dict[str, list[float]] = {"act": [], "update": []}
        self._read()

    def work(self, name: str, count: int, counts: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {count}\n")
        self.process.stdin.flush()
        seconds = self._read()
        if counts:
            self.seconds[name].append(seconds)

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


def describe(version: Version, first: Version) -> dict[str, Any]:
    """Milliseconds of each work, and how many times as long as the first version takes."""
    row: dict[str, Any] = {}
    for name, seconds in version.seconds.items():
        ratios = [here / there for here, there in zip(seconds, first.seconds[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row[name] = {
            "ms": 1e3 * statistics.median(seconds),
            f"times_{first.name}": {"median": middle, "low": low, "high": high},
        }
    return row


def main() -> None:
    from hardware import hardware
    from records import add_options, claim, keep

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", nargs="+", metavar="NAME=PATH", default=["now=src"])
    parser.add_argument("--turns", type=int, default=30)
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trees = [text.partition("=")[::2] for text in options.trees]
    versions = [Version(name, Path(path)) for name, path in trees]
    for turn in range(options.turns + 1):
        for name, count in (("act", 20), ("update", 1)):
            for version in versions:
                version.work(name, count, counts=turn > 0)
    for version in versions:
        version.close()
    sizes = {"acting": ACTING, "learning": LEARNING, **WIDTHS}
    record: dict[str, Any] = {
        "script": "benchmarks/set_network.py",
        "command": f"python benchmarks/set_network.py --trees {' '.join(options.trees)}",
        "hardware": hardware("cpu"),
        "turns": options.turns,
        "sizes": sizes,
        "versions": {version.name: describe(version, versions[0]) for version in versions},
    }
    print(json.dumps(record, indent=1))
    keep(options, record)


if __name__ == "__main__":
    answer() if "--answer" in sys.argv else main()
