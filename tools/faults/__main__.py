"""`make faults`: all parts, a part of them, or one case again."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="part of the whole campaign, such as 0.05"
    )
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="these parts, or groups as part/group"
    )
    parser.add_argument("--case", metavar="PART/GROUP/NUMBER", help="this case again")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="where to put the counts")
    parser.add_argument(
        "--page",
        action="store_true",
        help="of a whole campaign: write counts and table where the project keeps them",
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["FAULTS_SCALE"] = str(asked.scale)  # for cases whose length follows it
    from tools.faults import driver, parts, table, world

    began = time.monotonic()
    groups = parts.GROUPS
    if asked.case is not None:
        groups = [group for group in groups if group.key == asked.case.rpartition("/")[0]]
    elif asked.only:
        groups = [group for group in groups if group.part in asked.only or group.key in asked.only]
    world.prepare()
    told = driver.play(groups, asked.seed, asked.scale, asked.case, asked.workers)
    scale = 0.0 if asked.case or asked.only else asked.scale  # a part of it is no whole campaign
    found = table.counted(told, asked.seed, scale, time.monotonic() - began)
    print(table.text(found))
    if asked.json is not None:
        table.write_json(found, asked.json)
    if asked.page:
        table.write_page(found)
    sys.exit(1 if table.is_bad(found) else 0)


if __name__ == "__main__":
    main()
