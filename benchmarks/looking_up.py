"""What tables of names save of the whole loop of `esper ppo`, against naming by enums.

    python benchmarks/looking_up.py --out benchmarks/results/looking_up.json

A turn is a round of episodes, with a record of every decision, and the update after it. Turns with
tables and turns without alternate in one process; seconds are those of the CPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from hardware import hardware
from records import add_options, claim, keep

from esper.leyline.factored_actions import (
    ActionSpace,
    BlendAction,
    BlueprintAction,
    ChoiceNames,
    FactoredAction,
    LifecycleOp,
    look_up,
)
from esper.leyline.slots import SlotConfig
from esper.simic.config import TrainingConfig
from esper.simic.team import StopVote, Team
from esper.simic.trainer import build_agent, build_environment, build_rollout, play_round
from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.sink import Sink

USERS = ("esper.episodes", "esper.kasmina.model", "esper.telemetry.events")
"""Modules that look names up."""
CHOICE = (1, 1, 1, 0)


def name_by_enums(
    space: ActionSpace, op: int, slot: int, blueprint: int, blend: int
) -> ChoiceNames:
    """The names of a choice by way of the enums, the slot's id put together and found again."""
    slot_ids = {space.slots.index_for_slot_id(slot_id): slot_id for slot_id in space.slots.slot_ids}
    blueprint_id = space.blueprint_ids[blueprint]
    numbered = BlueprintAction[blueprint_id.upper()] if blueprint_id else BlueprintAction.NOOP
    action = FactoredAction(
        op=LifecycleOp(op),
        slot_idx=slot,
        blueprint_id=numbered.to_blueprint_id(),
        blend_algorithm_id=BlendAction[space.blends[blend].upper()].to_algorithm_id(),
        slot_id=slot_ids[slot],
    )
    return action.op.name, action.slot_id, action.blueprint_id, action.blend_algorithm_id


WAYS: dict[str, Callable[..., ChoiceNames]] = {"tables": look_up, "enums": name_by_enums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way")
    parser.add_argument("--hosts", type=int, default=8)
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    seconds, decisions, calls = measure(options.rounds, options.hosts)
    ratios = [
        without / with_tables
        for with_tables, without in zip(seconds["tables"], seconds["enums"], strict=True)
    ]
    nanoseconds = {way: time_one(name) for way, name in WAYS.items()}
    saved = calls * (nanoseconds["enums"] - nanoseconds["tables"]) / 1e9
    record = {
        "hardware": hardware("cpu"),
        "task": "blobs, 8 decisions an episode, telemetry at debug",
        "hosts": options.hosts,
        "turns_of_each_way": options.rounds,
        "decisions_per_turn": decisions,
        "look_ups_per_turn": calls,
        "ns_per_look_up": nanoseconds,
        "seconds_per_turn": {way: statistics.median(times) for way, times in seconds.items()},
        "enums_over_tables": {
            "median": statistics.median(ratios),
            "mean": statistics.mean(ratios),
            "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5,
        },
        "computed_share": saved / statistics.median(seconds["tables"]),
    }
    print(record)
    keep(options, record)


def measure(rounds: int, hosts: int) -> tuple[dict[str, list[float]], int, int]:
    """Seconds of every turn by way, decisions of a turn, and look-ups of a turn."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig.of(
            {
                "task": {"name": "blobs", "epochs": 9, "epoch_examples": 64},
                "hosts": hosts,
                "host_pool": hosts,
                "initial_wait": 0.5,
                "out": folder,
            }
        )
        env = build_environment(config)
        agent, _ = build_agent(config, env)
        rollout = build_rollout(env, agent)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        calls = [0]
        with Sink(Path(folder) / "events-0.jsonl", TelemetryConfig(TelemetryLevel.DEBUG)) as sink:

            def turn(number: int, name: Callable[..., ChoiceNames]) -> float:
                vote = StopVote(Team(), lambda: False)
                patches = [patch(f"{user}.look_up", name) for user in USERS]
                for patched in patches:
                    patched.start()
                started = time.process_time()
                play_round(env, agent, rollout, number, sink, vote)
                took = time.process_time() - started
                for patched in patches:
                    patched.stop()
                started = time.process_time()
                agent.update(rollout)
                return took + time.process_time() - started

            def counted(*choice):
                calls[0] += 1
                return look_up(*choice)

            turn(0, counted)
            for number in range(rounds):
                # the way that comes first changes from turn to turn
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    seconds[way].append(turn(number, WAYS[way]))
        return seconds, rollout.steps * hosts, calls[0]


def time_one(name: Callable[..., ChoiceNames], repeats: int = 20_000) -> float:
    """Nanoseconds of one look-up."""
    space = ActionSpace.of(SlotConfig.for_grid(1, 2), ("lora", "mlp"))
    started = time.process_time_ns()
    for _ in range(repeats):
        name(space, *CHOICE)
    return (time.process_time_ns() - started) / repeats


if __name__ == "__main__":
    main()
