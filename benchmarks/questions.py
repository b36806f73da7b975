"""The questions of lab/questions.md, each as one `esper compare`.

    python benchmarks/questions.py q2-cifar10 --data-root DATA --device cuda:0
    python benchmarks/questions.py --list

Results go to question_NAME.json in benchmarks/results, or in --out; one that is there stays, unless
you --replace it. docs/make_lab.py turns them into lab/questions.md. `--work DIR` keeps finished
arms, so that an interrupted question continues; `--remark TEXT` stands beside the table.
"""

import argparse
import datetime
import hashlib
import json
import tempfile
from pathlib import Path

from hardware import hardware
from records import claim_file, write
from rich.console import Console

from esper.cli.compare import run_compare
from esper.trials.config import CompareConfig

RESULTS = Path(__file__).parent / "results"
ALL = ["never", "sham", "random", "schedule", "heuristic"]
TRAINED = "trained"
"""Stands for the policy of --checkpoint."""
SHORT = {"epoch_examples": 3125, "batch": 512, "epochs": 30, "held_out": 1250}
"""Episodes as in the preset `cifar10`."""
SEARCH = "search:episodes=160"
"""Two generations of plans, on host seeds of their own."""
PLAN = (
    "schedule:epochs=0+5+7+10+12+13+15:places=r0c1.conv_heavy+r0c1.conv_heavy+r0c0.norm+r0c1.attention+r0c2.norm"
    "+r0c0.norm+r0c1.inverted_bottleneck"
)
"""What the policy for CIFAR-10 mostly does in the preset's episodes, as a fixed plan."""

QUESTIONS = {
    "q1-cifar10": {
        "asks": "From scratch, 20 epochs: growing against the same parameters and the "
        "same FLOPs in a static net.",
        "task": {"name": "cifar10", "epochs": 20},
        "policies": ["never", "heuristic"],
        "static": ["final", "final-equal-flops"],
        "rates": [0.5, 1.0, 2.0],
    },
    "q2-cifar10": {
        "asks": "From a host trained for 20 epochs, 10 more: growing against more "
        "training, sham, and from scratch.",
        "task": {"name": "cifar10", "epochs": 10},
        "policies": ["never", "sham", "heuristic"],
        "static": ["final", "final-whole"],
        "pretrain": 20,
    },
    "budget-cifar10": {
        "asks": "From a host trained for 15 epochs, 8 more, at most 1.3 x its "
        "parameters: is the place worth choosing?",
        "task": {"name": "cifar10", "epochs": 8, "budget": 1.3},
        "policies": ["never", "random", "schedule", "heuristic"],
        "pretrain": 15,
    },
    "q1-digits": {
        "asks": "From scratch, 40 epochs: growing against the same parameters and the "
        "same FLOPs in a static net.",
        "task": {"name": "digits", "epochs": 40},
        "policies": ALL,
        "static": ["start", "final", "final-equal-flops"],
        "rates": [1.0, 2.0],
    },
    "q2-digits": {
        "asks": "From a host trained for 30 epochs, 15 more: growing against more "
        "training, sham, and from scratch.",
        "task": {"name": "digits", "epochs": 15},
        "policies": ALL,
        "static": ["final", "final-whole"],
        "pretrain": 30,
    },
    "q2-fashion_mnist": {
        "asks": "From a host trained for 20 epochs, 10 more: growing against more "
        "training, sham, and from scratch.",
        "task": {"name": "fashion_mnist", "epochs": 10},
        "policies": ALL,
        "static": ["final", "final-whole"],
        "pretrain": 20,
    },
    "q2-shakespeare": {
        "asks": "From a text model trained for 20 epochs of 4,096 windows, 10 more: "
        "growing against the same controls.",
        "task": {"name": "shakespeare", "epochs": 10},
        "policies": ALL,
        "static": ["final", "final-whole"],
        "pretrain": 20,
    },
    "controller-digits": {
        "asks": "Short episodes as in the preset: a policy of `esper ppo --preset "
        "digits` on unseen host seeds.",
        "task": {"name": "digits", "epoch_examples": 512, "epochs": 16},
        "seed": 40000,
        "policies": ["never", "random", "heuristic", SEARCH, TRAINED],
        "static": ["final"],
    },
    "controller-cifar10": {
        "asks": "Episodes as in the preset: a policy of `esper ppo --preset cifar10` on "
        "host seeds that it never saw.",
        "task": {"name": "cifar10", **SHORT},
        "seed": 40000,
        "policies": ["never", "heuristic", PLAN, SEARCH, TRAINED],
        "static": ["final"],
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=QUESTIONS, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the questions and leave")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--checkpoint", type=Path, help="the trained policy of a controller's question"
    )
    parser.add_argument("--work", type=Path, help="folder for finished arms")
    parser.add_argument("--remark", help="what a reader of the table should know")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--replace", action="store_true", help="replace the result in --out")
    options = parser.parse_args()
    if options.list or options.question is None:
        for name, question in QUESTIONS.items():
            print(f"{name}: {question['asks']}")
        return
    path = options.out / f"question_{options.question}.json"
    claim_file(path, options.replace)
    asked = dict(QUESTIONS[options.question])
    asks = asked.pop("asks")
    if TRAINED in asked["policies"] and options.checkpoint is None:
        parser.error(f"{options.question} needs --checkpoint, a policy that `esper ppo` trained")
    asked["policies"] = [
        str(options.checkpoint) if policy == TRAINED else policy for policy in asked["policies"]
    ]
    with tempfile.TemporaryDirectory() as temporary:
        where = {
            "out": str(options.work or temporary),
            "data_root": options.data_root,
            "devices": [options.device],
        }
        config = CompareConfig.of({**asked, **where, "seeds": options.seeds})
        found = run_compare(config, True, Console())
    if found is None:
        raise SystemExit(130)
    command = (
        f"python benchmarks/questions.py {options.question} --seeds {options.seeds} "
        f"--device {options.device}"
    )
    extra = {"remark": options.remark} if options.remark else {}
    if TRAINED in QUESTIONS[options.question]["policies"]:
        command += " --checkpoint FILE"
        extra |= {"checkpoint_sha256": hashlib.sha256(options.checkpoint.read_bytes()).hexdigest()}
    record = {
        "question": options.question,
        "asks": asks,
        "command": command,
        "hardware": hardware(options.device),
        "date": datetime.date.today().isoformat(),
        **extra,
        **json.loads(_renamed(json.dumps(found), {str(options.checkpoint): TRAINED, PLAN: "plan"})),
    }
    write(path, record)
    for arm, row in record["arms"].items():
        score = row["test_accuracy"]
        print(
            f"{arm:20s} {100 * score['mean']:.2f} [{100 * score['low']:.2f}, "
            f"{100 * score['high']:.2f}]"
        )


def _renamed(text: str, names: dict[str, str]) -> str:
    for name, shown in names.items():
        text = text.replace(json.dumps(name)[1:-1], shown)  # also inside "final of NAME"
    return text


if __name__ == "__main__":
    main()
