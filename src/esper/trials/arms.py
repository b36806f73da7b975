"""One arm of a comparison: a policy's whole life on one host seed, from the first epoch to the harvested network."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from esper.garden import Garden, total_budget
from esper.kasmina.blueprints import REGISTRY, SHAM
from esper.kasmina.hosts import build_cnn_host
from esper.kasmina.model import GrowthSettings, MorphogeneticModel
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import count_parameters
from esper.runtime.data import DataSet
from esper.runtime.training import held_out_losses, score, train_epoch
from esper.tamiyo.rules import replay
from esper.telemetry.events import ArmFinished, Event, StageChanged


@dataclass(frozen=True)
class Recipe:
    """How every arm is trained: the same plan whatever the policy does."""

    epochs: int = 20
    batch: int = 64
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    constant_share: float = 0.5
    """part of the life at the full rate; a cosine to zero follows"""
    base_channels: int = 4
    blocks: int = 2
    budget: float = 3.0
    """most parameters, as a multiple of the host's"""
    scale_at_birth: float = 1.0

    def rate(self, progress: float) -> float:
        """Share of the peak rate after `progress` (0 to 1) of the life."""
        if progress <= self.constant_share:
            return 1.0
        return 0.5 * (1.0 + math.cos(math.pi * (progress - self.constant_share) / (1.0 - self.constant_share)))


@dataclass(frozen=True)
class ArmRun:
    """What an arm leaves behind."""

    result: ArmFinished
    events: tuple[Event, ...]
    network: nn.Module


def build_arm(data: DataSet, recipe: Recipe, seed: int, device: str) -> MorphogeneticModel:
    """The host of this seed, ready to grow; the same for every arm."""
    _, channels, size, _ = data.train.images.shape
    with own_randomness(seed):
        host = build_cnn_host(
            blocks=recipe.blocks, base_channels=recipe.base_channels, in_channels=channels, image_size=size
        )
    return MorphogeneticModel(
        host.to(device),
        blueprints=[*REGISTRY.names("image"), SHAM],
        budget=total_budget(recipe.budget, host),
        settings=GrowthSettings(seed=seed, scale_at_birth=recipe.scale_at_birth, epochs=recipe.epochs),
    )


def run_arm(
    data: DataSet,
    arm: str,
    seed: int,
    recipe: Recipe,
    *,
    device: str = "cpu",
    replayed: Sequence[Event] = (),
    watch: Callable[[Sequence[Event]], None] = lambda events: None,
) -> ArmRun:
    """Train one host under one policy and score the network it leaves.

    Args:
        replayed: another arm's events, for `sham` to go through without adding capacity.
        watch: is shown each epoch's events.
    """
    started = time.perf_counter()
    model = build_arm(data, recipe, seed, device)
    garden = Garden(model, replay(replayed) if replayed else arm)
    start_params = model.host_params
    optimizer = torch.optim.SGD(
        garden.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: recipe.rate(epoch / recipe.epochs))
    garden.attach(optimizer, scheduler)
    order = torch.Generator().manual_seed(seed)
    for _ in range(recipe.epochs):
        train_epoch(model, optimizer, data.train, recipe.batch, order)
        scheduler.step()
        watch(garden.step(lambda: held_out_losses(model, data.validation)))
    network = garden.harvest()
    validation, _ = score(network, data.validation)
    test, test_loss = score(network, data.test)
    stages = [event.after for event in garden.history if isinstance(event, StageChanged)]
    result = ArmFinished(
        arm=arm,
        seed=seed,
        epochs=recipe.epochs,
        start_params=start_params,
        final_params=count_parameters(network),
        validation_accuracy=validation,
        test_accuracy=test,
        test_loss=test_loss,
        seconds=time.perf_counter() - started,
        germinated=stages.count("GERMINATED"),
        fossilized=stages.count("FOSSILIZED"),
        culled=stages.count("CULLED"),
    )
    return ArmRun(result, tuple(garden.history), network)
