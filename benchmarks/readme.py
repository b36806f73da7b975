"""Runs the README's first program with several random seeds: how do its three networks compare?

    python benchmarks/readme.py --seeds 10 --out benchmarks/results/readme.json

It changes nothing of the program but the random seed.
"""

import argparse
import contextlib
import io
import re
from pathlib import Path
from statistics import fmean, stdev

from records import add_options, claim, keep

ROOT = Path(__file__).parents[1]
SEED = "torch.manual_seed(0)"
LINE = re.compile(r"^([a-z ]+): ([\d.]+)%, (\d+) parameters$", re.MULTILINE)


def read_program() -> str:
    """The first Python block of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)[1]
    if SEED not in program:
        raise SystemExit(f"the README's first program has no line {SEED}")
    return program


def play(program: str, seed: int) -> dict[str, dict[str, float]]:
    """Accuracy in per cent and parameters of each network, by its name, with one random seed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        exec(program.replace(SEED, f"torch.manual_seed({seed})"), {})
    lines = said.getvalue()
    networks = {}
    for name, accuracy, size in LINE.findall(lines):
        networks[name] = {"accuracy": float(accuracy), "parameters": int(size)}
    networks["grown"]["removed"] = lines.count(" removed, ")
    return networks


def main() -> None:
    """Play all seeds, and print means with standard errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    program = read_program()
    rows = [play(program, seed) for seed in range(options.seeds)]
    summary = {}
    for name in rows[0]:
        values = [row[name]["accuracy"] for row in rows]
        error = stdev(values) / len(values) ** 0.5
        summary[name] = {"mean": fmean(values), "standard_error": error}
        print(f"{name}: {fmean(values):.1f} ± {error:.1f}")
    keep(options, {"seeds": options.seeds, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
