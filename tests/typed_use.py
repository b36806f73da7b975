"""Every public name, as a user's strictly typed program uses it.

Nothing here runs: mypy reads it in `make lint`, pyright and mypy without our settings in `make slow`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import esper
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Reports
from esper.telemetry.events import Event, GrowthReported


@esper.blueprint("image", "typed", spatial=1.0)
def typed(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 1)


@esper.rule("typed")
@dataclass(frozen=True)
class Typed:
    facts: esper.HostFacts
    least: int = 100

    def choose(
        self,
        masks: Masks,
        reports: Reports,
        memory: dict[str, Any],
        signals: esper.Signals,
    ) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
        assert_type(signals.held_out_loss, float | None)
        return WAIT, memory


@esper.reward_term
def typed_term(facts: esper.StepFacts) -> float:
    return facts.accuracy - facts.twin_accuracy


def grow(model: nn.Module, example: Tensor, folder: Path) -> nn.Module:
    for place in esper.inspect(model, example):
        assert_type(place.name, str)
    lengths = esper.StageLengths(ramp=2)
    settings = esper.GrowthSettings(epochs=12, least_gain=0.01, lengths=lengths)
    garden = esper.grow(model, slots=["0"], example=example, budget=2.0, settings=settings)
    assert_type(garden, esper.Garden)
    assert_type(garden.model, esper.MorphogeneticModel)
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    with garden.ema(0.99).applied():
        garden.model(example)

    def evaluate() -> Tensor:
        return nn.functional.cross_entropy(garden.model(example), example, reduction="none")

    assert_type(garden.step(evaluate, train_loss=0.5), list[Event])
    assert_type(garden.report(), GrowthReported)
    assert_type(garden.summary(), str)
    assert_type(garden.save(folder), Path)
    try:
        garden = esper.load(folder, model)
    except esper.EsperError as problem:
        assert_type(str(problem), str)
    return garden.harvest()


def read(folder: Path) -> str:
    run = esper.read_run(folder)
    assert_type(run.rows("epochs"), list[dict[str, Any]])
    return run.csv()


def deepen(model: nn.Module) -> nn.Module:
    esper.check_host(model)
    esper.check_blueprint("image", "typed")
    return esper.deepen(model, to=12)


def pretrain(model: nn.Module, batches: list[Tensor], saved: dict[str, Any]) -> nn.Module:
    esper.compile_layers(model, "layers", mode="default")
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD([], lr=0.1)]
    plan = {3: 0.3, 4: 0.6}
    depth = esper.DepthSchedule(model, optimizers, layers="layers", to=4, total=1000, plan=plan)
    depth.load_state_dict(saved)
    for batch in batches:
        assert_type(depth.step(tokens=batch.numel()), bool)
    assert_type(depth.state_dict(), dict[str, Any])
    assert_type(depth.depth, int)
    small, adamw = esper.fork(model, optimizers[0])
    assert_type(adamw, torch.optim.Optimizer)
    _, both = esper.fork(model, optimizers)
    assert_type(both, list[torch.optim.Optimizer])
    esper.deepen(model, to=12, optimizer=optimizers)
    return small


def register(examples: torch.utils.data.Dataset[tuple[Tensor, int]]) -> esper.Task:
    varies = esper.Variety(9, noise=esper.Span(0, 0.3, exact=0.5))
    esper.reward_family("typed_family", {"typed_term": 1.0})
    task = esper.task_from_datasets("typed", examples, examples, lambda: nn.Linear(4, 2), 2)
    return esper.register_task(replace(task, varies=varies))


def teach(env: Any, task: esper.Task, folder: Path) -> esper.PPOAgent:
    hosts = esper.GrowthVectorEnv(task, 2, host_seeds=[1, 2], folder=folder)
    host = esper.GrowthEnv(task, host_seeds=[1])
    host.reset(seed=0)
    _, reward, terminated, *_ = host.step(host.action_space.sample())
    assert_type(reward, float)
    assert_type(terminated, bool)
    hosts.close()
    assert_type(esper.learn(env, 1000, esper.PPOConfig()), esper.PPOAgent)
    config = esper.TrainingConfig()
    agent = esper.train_ppo(config)
    agent.save(folder / f"{esper.__version__}.safetensors")
    return esper.PPOAgent.load(folder)
