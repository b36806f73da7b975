"""No choice is without effect, the twin of `test_every_knob`: what can be chosen changes a harvest.

Every built-in task and every preset is played with its own lengths, blends, blueprints and strength
at birth, on a small host of the same kind. Hosts with one random seed differ by their actions alone.
"""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from esper.kasmina.harvesting import harvest
from esper.kasmina.hosts import (
    build_cnn_host,
    build_resnet_host,
    build_transformer_host,
)
from esper.leyline.factored_actions import (
    NUM_OPS,
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    LifecycleOp,
)
from esper.leyline.lifecycle import repeated_blends
from esper.runtime.population import Population
from esper.runtime.tasks.builtin import BUILT_IN
from esper.simic.config import TrainingConfig, presets
from esper.tamiyo.masks import masks_for
from runtime.clocked import text_splits
from runtime.episodes import image_splits

SEED = 3
STAND_INS = {
    "points": {"batch": 16, "epoch_examples": 32},
    "images": {
        "load": lambda root: image_splits(count=120),
        "build_host": partial(
            build_cnn_host, blocks=2, base_channels=4, in_channels=1, image_size=8
        ),
    },
    "blocks of a ResNet": {
        "load": lambda root: image_splits(count=60, size=32, channels=3),
        "build_host": partial(build_resnet_host, width=4),
    },
    "text": {
        "load": lambda root: text_splits(context=8),
        "build_host": partial(
            build_transformer_host,
            vocabulary=256,
            width=8,
            layers=2,
            heads=2,
            context=8,
            slots=2,
        ),
    },
}
"""Hosts and data that take the place of a task's own, and train in no time."""
STAND_IN_OF = {
    "digits": "images",
    "digits_varied": "images",
    "fashion_varied": "images",
    "cifar10_varied": "images",
    "blobs": "points",
    "code": "text",
    "code_tiny": "text",
    "python_text": "text",
    "shakespeare": "text",
    "tinystories": "text",
    "fashion_mnist": "images",
    "cifar10": "images",
    "cifar10_deep": "images",
    "cifar10_resnet": "blocks of a ResNet",
}


def small(task):
    """The task with a small host and a short episode; how seeds are raised stays."""
    return replace(
        task,
        **{"batch": 8, "epoch_examples": 8, **STAND_INS[STAND_IN_OF[task.name]]},
        varies=None,
        clock="epochs",
        reference=None,
        held_out=None,
        augment=False,
        budget=1000.0,
        epochs=task.lengths.training + task.lengths.ramp + 3,
        lr=min(task.lr, 0.05),
    )


def distinct_tasks():
    """Tasks and presets as small ones, by the names of all that raise seeds in the same way."""
    tasks = {task.name: task for task in BUILT_IN}
    for name in presets():
        tasks[f"preset {name}"] = TrainingConfig.from_preset(name).task.build()
    names = {}
    for name, task in tasks.items():
        raising = (task.slots, task.blueprints, task.blends, task.lengths, task.scale_at_birth)
        names.setdefault((STAND_IN_OF[task.name], task.optimizer, raising), []).append(name)
    return {", ".join(alike): small(tasks[alike[0]]) for alike in names.values()}


TASKS = distinct_tasks()
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


class Play:
    """Hosts of one random seed, each with its own plan: epoch -> choice.

    `harvests` has what each host became, as its loss on every held-out example. `masks` has all that
    they were offered.
    """

    def __init__(self, task, plans):
        self.population = Population(task, [SEED] * len(plans))
        self.masks = []
        for epoch in range(task.epochs):
            self.population.train_epoch()
            assert self.population.evaluate() == [], "a host broke"
            for host, (view, plan) in enumerate(zip(self.population.views(), plans, strict=True)):
                self.masks.append(masks_for(view))
                if epoch in plan:
                    self.population.apply(host, plan[epoch])
            self.population.tick()
        self.harvests = [self._losses(run) for run in self.population.runs]

    @torch.no_grad()
    def _losses(self, run):
        split = run.splits.validation
        inputs, targets = split.gather(torch.arange(len(split)))
        outputs = harvest(run.model).eval()(inputs)
        return tuple(run.task.score(outputs, targets)[0].tolist())


def all_different(harvests):
    return len(set(harvests)) == len(harvests)


def space_of(task):
    return Population(task, [SEED]).runs[0].model.space


def decision_epoch(task):
    """The first epoch after which a seed planted after the first epoch can be kept."""
    return 1 + task.lengths.training + task.lengths.ramp


def plantings(task):
    """What masks allow to plant in an empty network.

    All blueprints and blends in the first slot, and one of each in the others.
    """
    masks = masks_for(Population(task, [SEED]).views()[0])
    assert masks["op"][OP_GERMINATE]
    blends = np.flatnonzero(masks["blend"]).tolist()
    first, *others = np.flatnonzero(masks["slot"][OP_GERMINATE]).tolist()
    for blueprint, blend in itertools.product(np.flatnonzero(masks["blueprint"][first]), blends):
        yield OP_GERMINATE, first, int(blueprint), blend
    for slot in others:
        yield OP_GERMINATE, slot, int(np.flatnonzero(masks["blueprint"][slot])[0]), blends[0]


def test_every_task_and_every_preset_is_played():
    assert set(STAND_IN_OF) == {task.name for task in BUILT_IN}
    played = ", ".join(TASKS).split(", ")
    assert sorted(played) == sorted([*STAND_IN_OF, *(f"preset {name}" for name in presets())])
    # as many kinds as there are ways to raise seeds: no stand-in hides one
    assert {task.lengths for task in TASKS.values()} == {task.lengths for task in BUILT_IN}


@every_task
def test_what_is_planted_where_and_how_it_is_blended_changes_the_harvest(task):
    choices = list(plantings(task))
    plans = [{}]
    for choice in choices:
        slot = choice[1]
        plan = {0: choice}
        if task.lengths.ramp:
            plan[decision_epoch(task)] = (OP_FOSSILIZE, slot, 0, 0)
        plans.append(plan)
    assert all_different(Play(task, plans).harvests)


@every_task
def test_keeping_culling_and_waiting_change_the_harvest_or_are_masked(task):
    planting = next(plantings(task))
    slot = planting[1]
    plans = [{0: planting}]
    if task.lengths.ramp:
        last = decision_epoch(task)
        plans += [
            {0: planting, last: (OP_FOSSILIZE, slot, 0, 0)},
            {0: planting, last: (OP_CULL, slot, 0, 0)},
            {0: planting, 1: (OP_CULL, slot, 0, 0)},
        ]
    play = Play(task, [{}, *plans])
    assert all_different(play.harvests)
    offered = np.any([masks["op"] for masks in play.masks], axis=0)
    possible = {OP_WAIT, OP_GERMINATE} | ({OP_CULL, OP_FOSSILIZE} if task.lengths.ramp else set())
    assert set(np.flatnonzero(offered).tolist()) == possible
    assert len(offered) == NUM_OPS == len(LifecycleOp)


@every_task
def test_every_blend_can_be_chosen_or_gives_the_harvest_of_one_that_can(task):
    space = space_of(task)
    repeated = repeated_blends(space.blends, task.lengths.ramp)
    possible = {space.blends[blend] for _, _, _, blend in plantings(task)}
    assert possible == set(space.blends) - set(repeated)
    _, slot, blueprint, _ = next(plantings(task))
    plan = {0: (OP_GERMINATE, slot, blueprint, 0)}
    if task.lengths.ramp:
        plan[decision_epoch(task)] = (OP_FOSSILIZE, slot, 0, 0)
    for blend, first in repeated.items():
        harvests = [Play(replace(task, blends=(name,)), [plan]).harvests for name in (blend, first)]
        assert harvests[0] == harvests[1]
