"""The contract of the configuration: every leaf is read, and changes what it says and not more."""

from dataclasses import dataclass, field

import pytest
import torch
from rich.console import Console

from cases import with_slow
from esper.cli import ppo as running
from esper.leyline.configuration import leaves
from esper.leyline.errors import EsperError
from esper.runtime import nursery, population
from esper.simic.config import TrainingConfig
from simic.tiny_runs import checkpoints_in, events_of, tiny

WEIGHTS, EVENTS, FILES, PROCESS, REFUSAL, STOPPED = (
    "weights",
    "events",
    "files",
    "process",
    "refusal",
    "stopped",
)
LOUD = {"ppo__lr": 0.5, "ppo__target_kl": None, "rounds": 3}
"""A learner that oversteps, so that there are anomalies."""

LONGER = {"task__epochs": 8}
"""Episodes in which slots open again."""


PLANTED_FOR_GOOD = {"task__epochs": 8, "task__lengths__ramp": 0}
"""Episodes with many fossils, whatever a fresh policy does."""

FEW = {"task__held_out": 8, "task__epoch_examples": 256}
"""Few enough held-out examples for a budget of compute."""


@dataclass(frozen=True)
class Knob:
    """Another value for a leaf, and what must differ from a run without it (weights only if they
    are named).
    """

    value: object
    differs: tuple[str, ...]
    beside: dict[str, object] = field(default_factory=dict)
    """settings that both runs have"""


LEARNS = (WEIGHTS,)
PLAYS = (WEIGHTS, EVENTS)
TABLE = {
    "task.name": Knob("digits", PLAYS),
    "task.epoch_examples": Knob(96, PLAYS),
    "task.held_out": Knob(100, PLAYS),
    "task.batch": Knob(16, PLAYS),
    "task.epochs": Knob(5, PLAYS),
    "task.clock": Knob("compute", PLAYS, {**FEW, "task__budget": 2.0}),
    "task.compute": Knob(2.0, PLAYS, {**FEW, "task__clock": "compute", "task__budget": 2.0}),
    "task.decay": Knob(0.9, PLAYS, {**FEW, "task__clock": "compute", "task__budget": 2.0}),
    "task.budget": Knob(1.01, PLAYS),
    "task.max_seeds": Knob(1, PLAYS),
    "task.slots": Knob(["r0c1"], PLAYS),
    "task.blueprints": Knob(["lora"], PLAYS),
    "task.blends": Knob(["gated"], PLAYS),
    "task.scale_at_birth": Knob(0.1, PLAYS),
    "task.lengths.training": Knob(1, PLAYS),
    "task.lengths.ramp": Knob(3, PLAYS),
    "task.prunes": Knob(False, PLAYS, PLANTED_FOR_GOOD),
    "task.lengths.embargo": Knob(0, PLAYS, LONGER),
    "task.lengths.resetting": Knob(0, PLAYS, LONGER),
    "suite": Knob({"families": [{"task": {"name": "digits_varied", "epochs": 2}}]}, PLAYS),
    "reward.family": Knob("loss", PLAYS),
    "reward.weights": Knob({"rent": 3.0}, PLAYS),
    "ppo.epochs": Knob(3, LEARNS),
    "ppo.minibatches": Knob(1, LEARNS),
    "ppo.gamma": Knob(0.5, LEARNS),
    "ppo.gae_lambda": Knob(0.1, LEARNS),
    "ppo.clip": Knob(1e-4, LEARNS),
    "ppo.clip_mode": Knob("joint", LEARNS),
    "ppo.value_clip": Knob(1e-4, LEARNS, {"ppo__epochs": 6, "ppo__target_kl": None}),
    "ppo.value_weight": Knob(0.0, LEARNS),
    "ppo.entropy": Knob(0.5, LEARNS),
    "ppo.entropy_floor": Knob(0.02, LEARNS),
    "ppo.lr": Knob(0.01, LEARNS),
    "ppo.lr_floor": Knob(0.02, LEARNS),
    "ppo.anneal_decisions": Knob(1, LEARNS),
    "ppo.target_kl": Knob(1e-9, LEARNS),
    "ppo.max_grad_norm": Knob(1e-4, LEARNS),
    "ppo.hidden_dim": Knob(9, PLAYS),
    "ppo.head_dim": Knob(9, PLAYS),
    "ppo.compile": Knob("eager", (PROCESS,)),
    "telemetry.level": Knob("minimal", (EVENTS,)),
    "telemetry.escalation_rounds": Knob(1, (EVENTS,), LOUD),
    "telemetry.track": Knob(["tensorboard"], (FILES,)),
    "imitation.rounds": Knob(1, PLAYS),
    "imitation.policy": Knob("schedule", PLAYS, {"imitation__rounds": 1}),
    "rounds": Knob(3, PLAYS),
    "hosts": Knob(3, PLAYS),
    "host_pool": Knob(4, PLAYS),
    "initial_wait": Knob(0.1, PLAYS),
    "seed": Knob(1, PLAYS),
    "devices": Knob(["cuda:300"], (REFUSAL,)),
    "policy_device": Knob("cuda:300", (REFUSAL,)),
    "executor": Knob("eager", (PROCESS,)),
    "amp": Knob("bf16", PLAYS),
    "compile": Knob("on", (PROCESS,)),
    "graph_memory": Knob(1.5, (PROCESS,)),
    "out": Knob("elsewhere", (FILES,)),
    "data_root": Knob("data", (REFUSAL,), {"task__name": "shakespeare", "task__batch": 16}),
    "threads": Knob(2, (PROCESS,)),
    "deterministic": Knob(True, (PROCESS,)),
    "observe_telemetry": Knob(False, PLAYS),
    "drop_readings": Knob(0.9, PLAYS),
    "keep_checkpoints": Knob(1, (FILES,), {"rounds": 3}),
    "time_limit": Knob(1e-9, (STOPPED,)),
    "stop_on_anomaly": Knob(True, (REFUSAL,), LOUD),
}


def test_the_table_names_every_leaf_and_no_other():
    assert set(TABLE) == set(leaves(TrainingConfig)) - {
        "imports"
    }  # which is noted, not set: cli/test_own_files.py


@pytest.mark.parametrize("key", with_slow(TABLE, {"ppo.compile"}))
def test_every_leaf_is_read_and_changes_what_it_says(key, tmp_path, monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    knob = TABLE[key]
    if repr(knob.beside) not in PLAIN:
        PLAIN[repr(knob.beside)] = facets_of(tiny(tmp_path / "plain", **knob.beside))
    base = PLAIN[repr(knob.beside)]
    found = facets_of(
        tiny(tmp_path / "changed", **knob.beside).with_changes([(key, knob.value)], "the test")
    )
    for facet in knob.differs:
        assert found.get(facet) != base.get(facet), facet
    if not {WEIGHTS, REFUSAL, STOPPED} & set(knob.differs):
        assert found[WEIGHTS] == base[WEIGHTS]


PLAIN = {}
"""Runs that others are compared with, each made once."""


def facets_of(config):
    """What a run decides:

    weights, events, files, how the process computed; or what it was refused with.
    """
    seen = {"executors": [], "threads": [], "compile": []}
    real = population.choose_executor

    def choose(name, *rest):
        seen["executors"].append((name, rest[-1]))
        return real(name, *rest)

    def ask(wanted, *rest):
        seen["compile"].append(wanted)
        return False

    def look(event):
        seen["repeatable"] = torch.are_deterministic_algorithms_enabled()

    def train(*args, train=running.train_ppo_vectorized, **options):
        agents.append(train(*args, **{**options, "watch": look}))

    agents = []
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "choose_executor", choose)
        patch.setattr(nursery, "is_compiled", ask)
        patch.setattr(
            torch, "set_num_threads", seen["threads"].append
        )  # more than there are cores takes minutes
        patch.setattr(running, "train_ppo_vectorized", train)
        try:
            if not running.run_ppo(config, False, Console(quiet=True)):
                return {STOPPED: True}
        except EsperError as problem:
            return {REFUSAL: f"{type(problem).__name__}: {problem}"}
    seen["graphs"] = graphs["unique_graphs"] > 0
    return {
        WEIGHTS: {name: value.tolist() for name, value in agents[0].network.state_dict().items()},
        EVENTS: events_of(config.out),
        FILES: (
            config.out.name if config.out.name == "elsewhere" else "",
            checkpoints_in(config.out),
            sorted(path.name for path in config.out.iterdir()),
        ),
        PROCESS: seen,
    }
