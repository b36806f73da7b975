"""How often seeds were kept and culled in line with the evidence under the lifecycle of 0.2.0.

    git worktree add /tmp/before 2465f686
    PYTHONPATH=/tmp/before/src python benchmarks/policies_before.py \\
        --policy /tmp/before/examples/policies/digits.safetensors --out benchmarks/results/policies_before.json

The policy for `digits` that came with 0.2.0 plays the hosts on which `policies.py` judges. Seeds
were kept by themselves then, so each end of a seed counts, whether an op or the lifecycle brought it.
It stands beside its last measurement; `clear` ones are further than one standard error from zero.
"""

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hardware import hardware
from records import add_options, claim, keep

from esper import __version__

JUDGING = range(40_000, 40_048)
"""As in `policies_jobs.py`, which the sources of 0.2.0 cannot import."""
SIDE_BY_SIDE = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=len(JUDGING), help="judging seeds to play")
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    torch.set_num_threads(1)
    counts, accuracies = play(options.policy, JUDGING[: options.hosts])
    record = {
        "script": "benchmarks/policies_before.py",
        "hardware": hardware("cpu"),
        "version": __version__,
        "seeds": [JUDGING.start, JUDGING.start + options.hosts - 1],
        "test_accuracy": sum(accuracies) / len(accuracies),
        "counts": dict(sorted(counts.items())),
    }
    print(record)
    keep(options, record)


def play(path: Path, seeds: range) -> tuple[Counter[str], list[float]]:
    """What became of all seeds on these hosts, and the accuracies that the hosts end with."""
    from esper.runtime.population import Population
    from esper.simic.checkpoints import load_fitting  # type: ignore[attr-defined]  # of 0.2.0
    from esper.simic.config import TrainingConfig
    from esper.trials.arms import Entry, run_entries

    task = TrainingConfig.from_preset("digits").task.build()
    space = Population(task, [0]).runs[0].model.space
    taught = load_fitting(path, space)
    counts: Counter[str] = Counter()
    accuracies = []
    for first in range(seeds.start, seeds.stop, SIDE_BY_SIDE):
        entries = []
        for seed in range(first, min(first + SIDE_BY_SIDE, seeds.stop)):
            entries.append(Entry("taught", seed, lambda facts: taught))
        for run in run_entries(task, entries):
            accuracies.append(run.result.test_accuracy)
            counts += count_ends(run.events)
    return counts, accuracies


def count_ends(events: Iterable[Any]) -> Counter[str]:
    """Ops that were chosen, and ends of seeds beside their last measurement."""
    counts: Counter[str] = Counter()
    measured: dict[str, Any] = {}
    for event in events:
        kind = type(event).__name__
        if kind == "SeedMeasured":
            measured[event.slot] = event
        elif kind == "ActionTaken":
            counts[f"{event.op} chosen"] += 1
        elif kind == "StageChanged" and event.after in ("FOSSILIZED", "CULLED"):
            counts[event.after] += 1
            evidence = measured[event.slot]
            if evidence.contribution is None:
                continue
            counts[f"{event.after} measured"] += 1
            helps = evidence.contribution > 0
            is_in_line = helps == (event.after == "FOSSILIZED")
            counts[f"{event.after} in line"] += is_in_line
            if abs(evidence.contribution) > evidence.standard_error:
                counts[f"{event.after} clear"] += 1
                counts[f"{event.after} clear in line"] += is_in_line
    return counts


if __name__ == "__main__":
    main()
