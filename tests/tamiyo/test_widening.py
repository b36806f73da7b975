"""Hosts of fewer slots in the action space of their family's widest list of slots."""

from dataclasses import replace

import numpy as np
import pytest

from esper.episodes import Episodes
from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE, OP_WAIT
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.tamiyo.masks import masks_for
from esper.tamiyo.observation import feature_names, observe
from esper.tamiyo.widening import narrow, observe_in, widen
from runtime.test_differing_hosts import DEEP


@pytest.fixture(scope="module")
def episodes():
    """A host of two slots and one of three, after their first epoch."""
    seeds = {}
    for seed in range(50):
        depth = Population(DEEP, [seed]).runs[0].variation.depth
        seeds.setdefault(depth, seed)
        if len(seeds) == 2:
            break
    playing = Episodes(Population(DEEP, [seeds[2], seeds[3]]))
    playing.train()
    return playing


def test_what_a_host_lacks_is_masked(episodes):
    space = episodes.population.space
    view = episodes.views[0]
    wide = masks_for(widen(view, space))
    own = masks_for(view)
    assert [wide[head].shape for head in ("slot", "blueprint")] == [
        (4, 3),
        (3, len(space.blueprint_ids)),
    ]
    assert (wide["op"] == own["op"]).all()
    assert (wide["blend"] == own["blend"]).all()
    assert (wide["slot"][:, :2] == own["slot"]).all()
    assert not wide["slot"][:, 2].any()
    assert (wide["blueprint"][:2] == own["blueprint"]).all()
    assert np.flatnonzero(wide["blueprint"][2]).tolist() == [0]


def test_a_host_with_every_slot_is_as_it_is(episodes):
    view = episodes.views[1]
    assert widen(view, episodes.population.space) is view


def test_what_a_host_lacks_reads_zero(episodes):
    space = episodes.population.space
    rows = observe_in(episodes.trackers, space)
    names = feature_names(space.slots)
    own = observe([episodes.trackers[0]])[0]
    own_names = feature_names(episodes.trackers[0].slots)
    for name, value in zip(names, rows[0], strict=True):
        expected = 0.0 if name.startswith("r0c2.") else own[own_names.index(name)]
        assert value == expected, name
    assert (rows[1] == observe([episodes.trackers[1]])[0]).all()


def test_a_choice_is_the_same_by_name():
    population = Population(get_task("blobs"), [1])
    space = population.space
    one = replace(space, slots=space.slots.choose(["r0c1"]))
    choice = (OP_GERMINATE, 1, 2, 1)
    assert narrow(choice, space, one) == (OP_GERMINATE, 0, 2, 1)
    assert narrow(choice, space, space) == choice
    assert narrow((OP_CULL, 0, 0, 0), space, one) is None
    assert narrow((OP_WAIT, 0, 0, 0), space, one) == (0, 0, 0, 0)


def test_an_act_in_a_slot_that_a_host_lacks_is_refused(episodes):
    space = episodes.population.space
    (event,) = episodes.act(0, (OP_GERMINATE, 2, 1, 0), space)
    assert (type(event).__name__, event.slot) == ("ActionRefused", "r0c2")
    assert "no slot r0c2" in str(event)
    planted = episodes.act(1, (OP_GERMINATE, 2, 1, 0), space)
    assert planted[0].slot == "r0c2"
