"""What one decision costs to read: names from the tables, by `look_up`, and by `FactoredAction.from_indices`.

    python benchmarks/decoding.py --out benchmarks/results/decoding.json

Nanoseconds per decision without the loop around it, median over repeats that take turns; once as it is and once under
`python -O`, which leaves the cross-check in `look_up` out.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hardware import hardware
from rich.console import Console
from rich.table import Table

from esper.leyline.factored_actions import DEFAULT_SPACE, OP_NAMES, FactoredAction, look_up

Decision = tuple[int, int, int, int]


def loop_only(decisions: list[Decision]) -> None:
    for _op, _slot, _blueprint, _blend in decisions:
        pass


def read_tables(decisions: list[Decision]) -> None:
    slot_ids, blueprint_ids, blends = (
        DEFAULT_SPACE.slots.slot_ids,
        DEFAULT_SPACE.blueprint_ids,
        DEFAULT_SPACE.blends,
    )
    for op, slot, blueprint, blend in decisions:
        _ = OP_NAMES[op], slot_ids[slot], blueprint_ids[blueprint], blends[blend]


def call_look_up(decisions: list[Decision]) -> None:
    space = DEFAULT_SPACE
    for op, slot, blueprint, blend in decisions:
        look_up(space, op, slot, blueprint, blend)


def build_actions(decisions: list[Decision]) -> None:
    space = DEFAULT_SPACE
    for op, slot, blueprint, blend in decisions:
        FactoredAction.from_indices(
            op_idx=op, slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, space=space
        )


WAYS: dict[str, Callable[[list[Decision]], None]] = {
    "loop only": loop_only,
    "tables": read_tables,
    "look_up": call_look_up,
    "FactoredAction.from_indices": build_actions,
}


def measure(count: int, repeats: int) -> list[dict]:
    draw = random.Random(0)
    decisions = [tuple(draw.randrange(size) for size in DEFAULT_SPACE.sizes) for _ in range(count)]
    nanoseconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, read in WAYS.items():
            started = time.perf_counter_ns()
            read(decisions)
            nanoseconds[way].append((time.perf_counter_ns() - started) / count)
    floor = statistics.median(nanoseconds["loop only"])
    rows = []
    for way, times in nanoseconds.items():
        low, middle, high = statistics.quantiles(times, n=4)
        rows.append(
            {
                "python": "python" if __debug__ else "python -O",
                "way": way,
                "ns_per_decision": middle if way == "loop only" else middle - floor,
                "quartiles_with_loop": [low, high],
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    table = Table("python", "way", "ns per decision", "quartiles, with the loop")
    for row in rows:
        low, high = row["quartiles_with_loop"]
        table.add_row(
            row["python"],
            row["way"],
            f"{row['ns_per_decision']:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument(
        "--rows", action="store_true", help="print this interpreter's rows as JSON, nothing else"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rows:
        print(json.dumps(measure(options.count, options.repeats)))
        return
    rows = []
    for flags in ([], ["-O"]):
        sizes = ["--count", str(options.count), "--repeats", str(options.repeats)]
        command = [sys.executable, *flags, __file__, "--rows", *sizes]
        rows += json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
    show(rows)
    if options.out:
        record = {"script": "benchmarks/decoding.py", "hardware": hardware("cpu"), "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
