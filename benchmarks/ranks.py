"""What training on several processes costs.

Two gloo ranks against two runs of one process side by side, and the bytes that they exchange.

    python benchmarks/ranks.py --out benchmarks/results/ranks.json --name NAME
    python benchmarks/ranks.py --device cuda --processes 1 2 4 --total-hosts 16 --out benchmarks/results/ranks.json --name NAME

Each process has one thread. Decisions per second are those of all processes together, over rounds 2
to the last. With --processes as many processes share the hosts and one device; the workload is that
of benchmarks/training.py --findings. `--device cpu --set task.epoch_examples=64 --set
task.epochs=3` is a quick look.
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
from typing import IO

from hardware import hardware
from records import add_options, claim, keep

from esper.storage.runfolder import event_files

HERE = Path(__file__)
SETTINGS = ["--set", "host_pool=8", "--set", "threads=1", "--seed", "3"]


def start(folder: Path, hosts: int, rounds: int, ranks: int) -> subprocess.Popen:
    """One run, alone or under torchrun."""
    command = [
        "-m",
        "esper",
        "ppo",
        "--preset",
        "digits",
        "--hosts",
        str(hosts),
        "--rounds",
        str(rounds),
        *SETTINGS,
    ]
    return launch([*command, "--out", str(folder)], ranks, subprocess.DEVNULL)


def launch(command: list[str], ranks: int, output: int | IO[str]) -> subprocess.Popen:
    """Python with these arguments, alone or under torchrun."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--master-port", str(29_500 + os.getpid() % 1000)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launcher, *command], env=environment, stdout=output, stderr=output)


def records_of(folder: Path, kind: str, rank: int = 0) -> list[dict]:
    paths = [path for (owner, _), path in event_files(folder).items() if owner == rank]
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [record for record in records if record["type"] == kind]


def rates(folder: Path) -> list[float]:
    """Decisions per second of every round but the first."""
    rounds = records_of(folder, "RoundFinished")
    return [sum(record["ops"].values()) / record["seconds"] for record in rounds[1:]]


def share(options: argparse.Namespace) -> list[dict]:
    """The same hosts on 1, 2, ... processes that share one device."""
    rows = []
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as temporary:
            folder, started, memory = Path(temporary) / "run", time.perf_counter(), [0]
            own = [
                str(HERE),
                "--rank-of",
                str(folder),
                "--device",
                options.device,
                "--amp",
                options.amp,
            ]
            own += ["--total-hosts", str(options.total_hosts), "--rounds", str(options.rounds)]
            own += [part for text in options.set for part in ("--set", text)]
            with open(Path(temporary) / "said", "w") as said:
                run = launch(own, processes, said)
                while run.poll() is None:
                    memory.append(gpu_megabytes() if options.device == "cuda" else 0)
                    time.sleep(0.5)
            assert run.returncode == 0, (Path(temporary) / "said").read_text()[-4000:]
            found = rates(folder)
            timed = [records_of(folder, "RankTimed", rank)[-1] for rank in range(processes)]
            rows.append(
                {
                    "processes": processes,
                    "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
                    "hosts": options.total_hosts,
                    "rounds": options.rounds,
                    "amp": options.amp,
                    "set": options.set,
                    "decisions_per_s": statistics.median(found),
                    "decisions_per_s_range": [min(found), max(found)],
                    "last_deal": [record["hosts"] for record in timed],
                    "last_round_seconds_by_rank": [record["seconds"] for record in timed],
                    "gpu_megabytes": max(memory),
                    "seconds": time.perf_counter() - started,
                }
            )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def gpu_megabytes() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def live(options: argparse.Namespace) -> None:
    """One of the processes that share a device: `esper ppo` on generated images."""
    import torch
    from rich.console import Console
    from training import config_of

    from esper.cli.ppo import run_ppo

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    options.findings, options.hosts, options.data_root = True, options.total_hosts, None
    device = "cuda:0" if options.device == "cuda" else "cpu"
    options.set = [f"devices={json.dumps([device])}", "threads=1", *options.set]
    run_ppo(config_of(options, str(options.rank_of)), False, Console())


def measure(options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pairs = []
        for turn in range(options.turns):
            together = start(root / f"together-{turn}", 2 * options.hosts, options.rounds, 2)
            assert together.wait() == 0
            apart = [
                start(root / f"apart-{turn}-{place}", options.hosts, options.rounds, 1)
                for place in range(2)
            ]
            assert [run.wait() for run in apart] == [0, 0]
            both = statistics.median(rates(root / f"together-{turn}"))
            alone = sum(
                statistics.median(rates(root / f"apart-{turn}-{place}")) for place in range(2)
            )
            pairs.append((both, alone))
            print(
                f"two ranks {both:.1f} decisions/s, two runs {alone:.1f}: {both / alone:.3f}",
                flush=True,
            )
    return {
        "hosts_per_process": options.hosts,
        "rounds": options.rounds,
        "pairs": pairs,
        "efficiency": statistics.median(both / alone for both, alone in pairs),
        "bytes_per_update": bytes_per_update(),
    }


def bytes_per_update() -> dict:
    """What one rank sends per minibatch and per round, for the presets' networks."""
    from esper.simic.config import TrainingConfig
    from esper.tamiyo.layout import ObservationLayout
    from esper.tamiyo.network import FactoredRecurrentActorCritic

    found = {}
    for preset, layout in (
        ("digits", ObservationLayout(2, 9)),
        ("cifar10", ObservationLayout(3, 9)),
    ):
        ppo = TrainingConfig.from_preset(preset).ppo
        network = FactoredRecurrentActorCritic(
            layout.width,
            layout.num_slots,
            layout=layout,
            hidden_dim=ppo.hidden_dim,
            head_dim=ppo.head_dim,
        )
        parameters = sum(parameter.numel() for parameter in network.parameters())
        steps = ppo.epochs * ppo.minibatches
        found[preset] = {"parameters": parameters, "gradient_bytes": 4 * parameters, "steps": steps}
    return found


def time_gloo(megabytes: float, repeats: int = 50) -> float:
    """Seconds for one sum over two local gloo ranks of a gradient of this size."""
    script = (
        "import torch, time, torch.distributed as d; torch.set_num_threads(1); "
        "d.init_process_group('gloo');"
        f"x = torch.zeros({int(megabytes * 250_000)}); [d.all_reduce(x) for _ in "
        f"range(5)]; t = time.perf_counter();"
        f"[d.all_reduce(x) for _ in range({repeats})]; s = (time.perf_counter() - t) / {repeats};"
        "print(s) if d.get_rank() == 0 else None; d.barrier(); d.destroy_process_group()"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            "29811",
        ]
        said = subprocess.run(
            [*command, file.name], capture_output=True, text=True, check=True
        ).stdout
    return float(said.split()[-1])


def compare(options: argparse.Namespace) -> dict:
    """Two ranks against two runs, and what sums cost."""
    started = time.perf_counter()
    row = measure(options)
    row["gloo_sum_seconds"] = {
        preset: time_gloo(sizes["gradient_bytes"] / 1e6)
        for preset, sizes in row["bytes_per_update"].items()
    }
    print(json.dumps(row), f"{time.perf_counter() - started:.0f} s")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", type=int, default=6, help="per process; twice as many are the preset's own"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--processes", type=int, nargs="+", help="numbers of processes that share one device"
    )
    parser.add_argument(
        "--total-hosts", type=int, default=16, help="of all processes that share a device"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="the device that is shared"
    )
    parser.add_argument("--amp", default="off")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="KEY=VALUE of the shared workload's configuration",
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.rank_of:
        live(options)
        return
    claim(options)
    rows = share(options) if options.processes else [compare(options)]
    record = {
        "script": HERE.parent.name + "/" + HERE.name,
        "hardware": hardware(options.device),
        "rows": rows,
    }
    keep(options, record)


if __name__ == "__main__":
    main()
