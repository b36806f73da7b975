"""Parts of a population that train at the same time, and seeds that are kept without a new
graph.
"""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from esper.episodes import Episodes
from esper.leyline.errors import DataError, SettingError
from esper.runtime import population as populations
from esper.runtime.executors.compiling import CompiledSoFar
from esper.runtime.executors.structure import good_state_key, graph_key
from esper.runtime.host import HostRun
from esper.runtime.population import Population
from runtime.episodes import (
    BLOBS,
    COPIES,
    GERMINATE,
    GROWTH,
    IMAGES,
    differing,
    epochs,
    play,
    print_of,
)
from runtime.executors.test_compiling import TEXT


def in_turn(parts, rounds):
    """Both parts' epochs are under way at once, as the trainer has them."""
    for part in parts:
        part.start_epoch(then_evaluate=True)
    for number in range(rounds):
        for part in parts:
            part.finish_epoch()
            part.evaluate()
            part.tick()
            if number + 1 < rounds:
                part.start_epoch(then_evaluate=True)


def test_parts_that_take_turns_have_the_episodes_of_the_whole():
    whole, divided = Population(IMAGES, [1, 2, 3]), Population(IMAGES, [1, 2, 3])
    play(whole, 3)
    in_turn([divided.part(range(1)), divided.part(range(1, 3))], 3)
    assert [differing(print_of(whole, host), print_of(divided, host)) for host in range(3)] == [
        []
    ] * 3


def test_a_second_is_charged_to_one_part_only(monkeypatch):
    population = Population(BLOBS, [1, 2, 3, 4])
    clock = count()
    monkeypatch.setattr(
        populations, "time", SimpleNamespace(perf_counter=lambda: float(next(clock)))
    )
    in_turn([population.part(range(2)), population.part(range(2, 4))], 5)
    charged = sum(cost.seconds for run in population.runs for cost in run.ledger.phases.values())
    assert 0 < charged <= next(clock)


def test_deciding_and_pruning_of_one_part_are_not_the_others_seconds(monkeypatch):
    population = Population(BLOBS, [1, 2])
    first, second = population.part(range(1)), population.part(range(1, 2))
    clock = count(step=1.0)
    monkeypatch.setattr(populations, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    first.start_epoch()
    second.start_epoch()
    for _ in range(50):
        next(clock)  # the policy takes its time, and is charged
    Episodes(second).charge_policy([0], 1, 50.0)
    first.finish_epoch()
    assert population.runs[0].ledger.phases["training"].seconds < 10


def test_parts_share_governors_and_the_end():
    population = Population(BLOBS, [1, 2])
    part = population.part(range(1))
    part.reset(0, 5)
    assert part.governors[0] is population.governors[0]
    assert population.governors[0].best_loss == float("inf")
    population.final_scores()
    with pytest.raises(DataError, match="over"):
        part.start_epoch()


def test_what_one_part_compiled_is_told_once(monkeypatch):
    population = Population(BLOBS, [1, 2])
    first, second = population.part(range(1)), population.part(range(1, 2))
    monkeypatch.setattr(populations, "compiled_so_far", lambda: CompiledSoFar(3, 1.5))
    assert [first.take_compiled(), second.take_compiled()] == [(3, 1.5), (0, 0.0)]


def test_an_epoch_that_nobody_started_cannot_be_waited_for():
    population = Population(BLOBS, [1])
    population.train_epoch()
    with pytest.raises(SettingError, match="start_epoch"):
        population.finish_epoch()


# -- kept seeds ------------------------------------------------------------------------------------

PLANTED = [(GERMINATE, "r0c0", "mlp")]


def as_the_seed_it_was(learn):
    """A step as a graph from before would replay it:

    the last fossil is blended in at full strength.
    """

    def step(run, inputs, targets):
        kept = [
            (slot, slot.fossils) for slot in run.slots if slot.seed is None and len(slot.fossils)
        ]
        for slot, fossils in kept:
            slot.fossils, slot.seed, slot.is_in_output = (
                nn.ModuleList([*fossils][:-1]),
                fossils[-1],
                True,
            )
        learn(run, inputs, targets)
        for slot, fossils in kept:
            slot.fossils, slot.seed, slot.is_in_output = fossils, None, False

    return step


@pytest.mark.parametrize("script", [GROWTH, COPIES], ids=["random", "copies"])
def test_a_kept_seed_trains_to_the_bit_as_the_seed_that_it_was(script, monkeypatch):
    """`GROWTH` keeps a gated one, whose gradients are added in the order in which its parts were
    called.
    """
    task = TEXT if script is COPIES else IMAGES
    expected = epochs(task, [7], 8, {0: script})
    assert any(len(slot.fossils) for slot in expected.runs[0].slots)
    monkeypatch.setattr(HostRun, "learn", as_the_seed_it_was(HostRun.learn))
    assert differing(print_of(expected), print_of(epochs(task, [7], 8, {0: script}))) == []


def test_keeping_a_seed_leaves_the_wiring_and_changes_what_a_rollback_goes_back_to():
    population = epochs(BLOBS, [1], 3, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    run = population.runs[0]
    before = graph_key(run), good_state_key(run)
    play(population, 2)
    assert len(run.slots[0].fossils) == 1  # probation is over
    assert (graph_key(run) == before[0], good_state_key(run) == before[1]) == (True, False)
    assert float(run.model.slot("r0c0").alpha) == 1.0  # as the graph from before reads it
    planted = graph_key(run)
    play(population, 1, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    assert graph_key(run) != planted


def test_a_kept_seed_that_is_live_again_is_another_wiring():
    """A graph that was captured of the fossil does not read alpha, which is below 1 on the ramp."""
    population = epochs(
        replace(BLOBS, lengths=replace(BLOBS.lengths, ramp=3)), [1], 2, {0: {0: PLANTED}}
    )
    run, snapshot = population.runs[0], population.snapshot()
    assert run.slots[0].state.alpha < 1
    play(population, 4)
    kept = graph_key(run)
    assert len(run.slots[0].fossils) == 1
    population.restore(snapshot)
    assert graph_key(run) != kept
    live = graph_key(run)
    population.restore(population.snapshot())
    assert graph_key(run) == live


def grown_gradients(clip_norm, epoch=8):
    """A host with a fossil, from the eighth epoch on with a live seed behind it, and gradients
    everywhere.
    """
    script = {0: [(GERMINATE, "r0c0", "mlp")], 6: [(GERMINATE, "r0c0", "lora")]}
    run = epochs(replace(BLOBS, clip_norm=clip_norm), [1], epoch, {0: script}).runs[0]
    run.begin_epoch()
    run._forward(*run.splits.train.gather(torch.arange(64)))[0].mean().backward()
    assert len(run.slots[0].fossils) == 1
    assert (run.slots[0].seed is not None) == (epoch == 8)
    return run


@pytest.mark.parametrize("epoch", [6, 8], ids=["kept", "kept and planted"])
def test_hosts_are_clipped_as_gardens_are(epoch):
    run = grown_gradients(1e-4, epoch)
    gradients = [p.grad.clone() for p in run.model.parameters()]
    norms = [float(norm) for norm in run.clip_gradients()]
    clipped = [p.grad.clone() for p in run.model.parameters()]
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    expected = [0.0 if norm is None else float(norm) for norm in run.model.clip_gradients(1e-4)]
    assert norms == pytest.approx(expected, rel=1e-6)
    assert min(norm for norm in norms if norm) > 1e-4
    for own, parameter in zip(clipped, run.model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, rtol=1e-5, atol=0.0)


def test_a_seed_whose_gradient_is_not_a_number_leaves_the_hosts_alone():
    run = grown_gradients(1e9)
    seed = run.slots[0].seed
    own = {id(parameter) for parameter in seed.parameters()}
    next(seed.parameters()).grad.fill_(torch.nan)
    expected = [p.grad.clone() for p in run.model.parameters() if id(p) not in own]
    run.clip_gradients()
    found = [p.grad for p in run.model.parameters() if id(p) not in own]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
