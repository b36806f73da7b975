"""The task `cifar10_resnet`: deeper by copies of its own blocks."""

from dataclasses import replace

import torch

from esper.kasmina.harvesting import harvest
from esper.kasmina.hosts import build_resnet_host
from esper.leyline.lifecycle import StageLengths
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from runtime.episodes import GERMINATE, act, image_splits


@torch.no_grad()
def test_the_resnet_may_grow_from_two_to_six_blocks_in_every_stage():
    task = replace(
        get_task("cifar10_resnet"),
        blueprints=("copy_zero",),
        batch=64,
        lengths=StageLengths(ramp=0),
    )
    population = Population(task, [1], splits=image_splits(120, 32, 3))
    model, images = population.runs[0].model.eval(), torch.randn(2, 3, 32, 32)
    before = model(images)
    for slot_id in task.slots * 4:
        act(population, 0, GERMINATE, slot_id, "copy_zero")
    six = build_resnet_host(blocks=6)
    assert model.total_params == sum(parameter.numel() for parameter in six.parameters())
    assert torch.equal(model(images), before)
    assert len(harvest(model).blocks) == len(six.blocks)
