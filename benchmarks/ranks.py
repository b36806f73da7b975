"""What training on several processes costs: two gloo ranks against two runs of one process side by side, and bytes.

    python benchmarks/ranks.py --out benchmarks/results/ranks.json

Each process has one thread. Decisions per second are those of all processes together, over rounds 2 to the last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hardware import hardware

SETTINGS = ["--set", "host_pool=8", "--set", "task.life=12", "--set", "threads=1", "--seed", "3"]


def start(folder: Path, hosts: int, rounds: int, ranks: int) -> subprocess.Popen:
    """One run, alone or under torchrun."""
    launcher = [sys.executable, "-m", "esper"]
    if ranks > 1:
        port = str(29_500 + os.getpid() % 1000)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--master-port", port, "-m", "esper"]
    command = [*launcher, "ppo", "--preset", "digits", "--hosts", str(hosts), "--rounds", str(rounds), *SETTINGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--out", str(folder)], env=environment, **quiet)


def rates(folder: Path) -> list[float]:
    """Decisions per second of every round but the first."""
    records = [json.loads(line) for line in (folder / "events-0.jsonl").read_text().splitlines()]
    rounds = [record for record in records if record["type"] == "RoundFinished"]
    return [sum(record["ops"].values()) / record["seconds"] for record in rounds[1:]]


def measure(options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pairs = []
        for turn in range(options.turns):
            together = start(root / f"together-{turn}", 2 * options.hosts, options.rounds, 2)
            assert together.wait() == 0
            apart = [start(root / f"apart-{turn}-{place}", options.hosts, options.rounds, 1) for place in range(2)]
            assert [run.wait() for run in apart] == [0, 0]
            both = statistics.median(rates(root / f"together-{turn}"))
            alone = sum(statistics.median(rates(root / f"apart-{turn}-{place}")) for place in range(2))
            pairs.append((both, alone))
            print(f"two ranks {both:.1f} decisions/s, two runs {alone:.1f}: {both / alone:.3f}", flush=True)
    return {
        "hosts_per_process": options.hosts,
        "rounds": options.rounds,
        "pairs": pairs,
        "efficiency": statistics.median(both / alone for both, alone in pairs),
        "bytes_per_update": bytes_per_update(),
    }


def bytes_per_update() -> dict:
    """What one rank sends per minibatch and per round, for the presets' networks."""
    from esper.simic.training_config import TrainingConfig
    from esper.tamiyo.network import FactoredRecurrentActorCritic

    found = {}
    for preset, slots, blueprints, width in (("digits", 2, 9, 61), ("cifar10", 3, 9, 80)):
        ppo = TrainingConfig.from_preset(preset).ppo
        network = FactoredRecurrentActorCritic(
            width, slots, num_blueprints=blueprints, num_blends=3, hidden_dim=ppo.hidden_dim, head_dim=ppo.head_dim
        )
        parameters = sum(parameter.numel() for parameter in network.parameters())
        steps = ppo.epochs * ppo.minibatches
        found[preset] = {"parameters": parameters, "gradient_bytes": 4 * parameters, "steps": steps}
    return found


def time_gloo(megabytes: float, repeats: int = 50) -> float:
    """Seconds for one sum over two local gloo ranks of a gradient of this size."""
    script = (
        "import torch, time, torch.distributed as d; torch.set_num_threads(1); d.init_process_group('gloo');"
        f"x = torch.zeros({int(megabytes * 250_000)}); [d.all_reduce(x) for _ in range(5)]; t = time.perf_counter();"
        f"[d.all_reduce(x) for _ in range({repeats})]; s = (time.perf_counter() - t) / {repeats};"
        "print(s) if d.get_rank() == 0 else None; d.barrier(); d.destroy_process_group()"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29811"]
        said = subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
    return float(said.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="per process")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    row = measure(options)
    row["gloo_sum_seconds"] = {
        preset: time_gloo(sizes["gradient_bytes"] / 1e6) for preset, sizes in row["bytes_per_update"].items()
    }
    print(json.dumps(row), f"{time.perf_counter() - started:.0f} s")
    if options.out:
        record = {"script": "benchmarks/ranks.py", "hardware": hardware("cpu"), "rows": [row]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
