"""A thousand rounds in one process, a thousand saves: memory, descriptors and files stay as they are."""

import json
import os
import resource
from collections import Counter

from esper.simic.training import train_ppo
from esper.telemetry import sink
from faults.commands import Bad, no_waiting
from simic.tiny_runs import tiny
from tools.faults.driver import WORKS, Group
from tools.faults.power import garden_subject

ROUNDS = 1000
GROWTH = 0.02
"""of the memory that the process has after a fifth of the rounds; what grows by less is an allocator's noise"""


def facts():
    """Memory in bytes, open descriptors, threads of this process."""
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[1]) * resource.getpagesize()
    return memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def apart(act, place):
    """Let `act(note)` run in a process of its own; what it noted, in order."""
    path = place / "noted"
    process = os.fork()
    if process == 0:
        code = 1
        try:
            no_waiting()
            with open(path, "w", buffering=1) as file:
                act(lambda *values: file.write(json.dumps([*values, *facts()]) + "\n"))
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code:
        raise Bad(f"it ended with {code}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_flat(noted, what):
    """Rows of (..., memory, descriptors, threads): as in the second fifth, so at the end."""
    start, end = noted[len(noted) // 5 : 2 * len(noted) // 5], noted[-len(noted) // 5 :]
    before, after = (max(row[-3] for row in rows) for rows in (start, end))
    if after > before * (1 + GROWTH) + (1 << 20):
        raise Bad(f"memory grows with {what}: {before >> 10} kB, then {after >> 10} kB")
    for index, name in ((-2, "descriptors"), (-1, "threads")):
        counts = [row[index] for row in (*start, *end)]
        if max(counts) > max(row[index] for row in start):
            raise Bad(f"{name} grow with {what}: {counts[0]}, then {counts[-1]}")


def rounds(draw, number, place):
    """`esper ppo`, tiny; the number of rounds follows the scale that the driver sets."""
    count = max(60, round(ROUNDS * scale()))
    config = tiny(place / "run", rounds=count, telemetry__level="minimal", keep_checkpoints=2)

    def act(note):
        sink.SEGMENT = 2**26  # as in any run: here the number of files has to stay the same
        train_ppo(
            config, watch=lambda event: note(event.round, len(list((place / "run").rglob("*"))))
        )

    noted = apart(act, place)
    if len(noted) != count:
        raise Bad(f"{len(noted)} rounds of {count}")
    require_flat(noted, "rounds")
    # one more while the best checkpoint is not among the newest
    counts = [row[1] for row in noted]
    if max(counts[-len(counts) // 5 :]) > max(counts[: 2 * len(counts) // 5]):
        raise Bad("files grow with rounds")
    return Counter({WORKS: count})


def saves(draw, number, place):
    count = max(60, round(1000 * scale()))

    def act(note):
        for save in range(count):
            garden_subject().save(place / "garden", save)
            garden_subject().load(place / "garden")
            note(save)

    require_flat(apart(act, place), "saves")
    return Counter({WORKS: count})


def scale():
    return float(os.environ.get("FAULTS_SCALE", "1"))


GROUPS = [
    Group("soak", "rounds of esper ppo in one process", rounds, seconds=1500),
    Group("soak", "garden.save and esper.load in one process", saves, seconds=900),
]
