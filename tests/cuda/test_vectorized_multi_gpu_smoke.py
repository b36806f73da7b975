"""Hosts spread over two GPUs land on both and train there. Made-up data only; skipped below two devices."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from esper.runtime.devices import describe_map
from esper.runtime.population import Population
from esper.runtime.tasks import get_task
from runtime.episodes import GERMINATE, QUICK, image_splits, play

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PHOTOS = replace(
    get_task("cifar10"),
    load=lambda root: image_splits(count=400, size=32, channels=3, contrast=20),
    epoch_examples=256,
    batch=64,
    lr=0.02,
    epochs=8,
    lengths=QUICK,
)


@pytest.fixture(params=["eager", "graphed"])
def population(request):
    return Population(PHOTOS, [1, 2, 3, 4], ["cuda:0", "cuda:1"], executor=request.param)


def devices_of(run):
    return {parameter.device for parameter in run.model.parameters()} | {
        run.splits.train.inputs.device,
        run.sums.device,
    }


def test_hosts_land_on_both_devices(population):
    landed = [devices_of(run) for run in population.runs]
    assert landed == [{torch.device("cuda", index)} for index in (0, 0, 1, 1)]
    assert Counter(population.placed) == {torch.device("cuda:0"): 2, torch.device("cuda:1"): 2}
    assert describe_map(population.placed) == "cuda:0: 2 hosts, cuda:1: 2 hosts"


def test_hosts_on_both_devices_train_and_grow(population):
    first = [reading.train_loss for reading in population.train_epoch()]
    population.evaluate()
    play(population, 4, {host: {0: [(GERMINATE, "r0c1", "conv_light")]} for host in (0, 3)})
    last = population.readings()
    assert all(math.isfinite(reading.held_out_loss) for reading in last)
    assert all(reading.train_loss < before for reading, before in zip(last, first, strict=True))
    assert [run.model.active_seeds for run in population.runs] == [1, 0, 0, 1]
    assert all(len(devices_of(run)) == 1 for run in population.runs)


def test_the_final_report_comes_from_both_devices(population):
    population.train_epoch()
    assert all(0 <= final.accuracy <= 1 for final in population.final_scores())
