"""What each slot of a host contributes: which readings count, what the end of an episode leaves and
what is paid for it, on hosts of `blobs`.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.kasmina.harvesting import harvest
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE
from esper.runtime.counterfactuals import score_examples
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.simic.rewards import FAMILIES, share_out
from esper.telemetry.events import HostRolledBack, RemainsMeasured
from simic.growths import (
    LORA,
    MLP,
    POINTS,
    WAIT,
    always,
    grow,
    kinds,
    play,
    poisoner,
    scripted,
)

PLANT, ALSO = (OP_GERMINATE, 0, MLP, 0), (OP_GERMINATE, 1, MLP, 0)
KEEP, KEEP_OTHER = (OP_FOSSILIZE, 0, 0, 0), (OP_FOSSILIZE, 1, 0, 0)
BLOBS = replace(get_task("blobs"), epochs=12)
PAYS = {"contribution": 1.0, "harm": 1.0}
"""Contribution without its prices."""


def worths(env, policy, **options):
    """What a host's book says after every step."""
    seen = []
    lived = play(env, policy, meddle=lambda env, step: seen.append(env.books[0].worth), **options)
    return [*seen, env.books[0].worth], lived


# -- readings --------------------------------------------------------------------------------------


def test_a_seed_counts_from_its_first_measurement_on_and_keeps_its_reading_as_a_fossil(twins):
    env = grow(POINTS, 1, twins, seeds=[3])
    seen, _ = worths(env, scripted({0: PLANT, 2: KEEP}), steps=4)
    by_epoch = [worth.contributions["r0c0"] for worth in seen]
    assert by_epoch[:2] == [0.0, 0.0]
    assert by_epoch[2] != 0.0
    assert by_epoch[3] == by_epoch[4] == by_epoch[2], "a fossil is not measured every epoch"
    assert all(worth.contributions["r0c1"] == 0.0 for worth in seen)


def test_a_culled_seed_takes_its_reading_with_it(twins):
    env = grow(POINTS, 1, twins, seeds=[3], weights=PAYS)
    seen, lived = worths(env, scripted({0: PLANT, 3: (OP_CULL, 0, 0, 0)}), steps=4)
    assert seen[3].contributions["r0c0"] != 0.0
    assert seen[4].contributions["r0c0"] == 0.0
    # what it was paid is taken back
    paid = lived[4].info["reward_parts"][0]["contribution:r0c0"]
    assert paid == -share_out(seen[3].contributions, seen[3].lead).by_slot["r0c0"] < 0.0


def test_a_rollback_takes_the_readings_of_seeds_and_leaves_the_lead(twins):
    env = grow(POINTS, 1, twins, seeds=[3])
    script = scripted({0: PLANT, 2: KEEP, 3: ALSO})
    seen = []

    def meddle(env, step):
        seen.append(env.books[0].worth)
        poisoner(0, 5)(env, step)

    lived = play(env, script, steps=6, meddle=meddle)
    assert kinds(lived[-1].info["events"][0], HostRolledBack)
    before, after = seen[5], env.books[0].worth
    assert before.contributions["r0c1"] != 0.0
    assert after.contributions == {"r0c0": before.contributions["r0c0"], "r0c1": 0.0}
    assert after.lead == before.lead


def test_what_a_rollback_in_the_last_epoch_leaves_has_a_lead_of_its_own(twins):
    env = grow(POINTS, 1, twins, seeds=[3])
    script = scripted({0: PLANT, 2: KEEP, 3: ALSO})
    lived = play(env, script, meddle=poisoner(0, POINTS.epochs - 2))
    told = lived[-1].info["events"][0]
    assert kinds(told, HostRolledBack)
    (remains,) = kinds(told, RemainsMeasured)
    saved = env.twin(0).held_out_loss - remains.held_out_loss
    assert env.books[0].worth.lead == pytest.approx(saved / env.units[3])


def test_an_episode_begins_with_nothing(twins):
    env = grow(POINTS, 1, twins, seeds=[3])
    play(env, scripted({0: PLANT, 2: KEEP}))
    env.step(np.array([WAIT]))
    assert env.books[0].worth.contributions == {"r0c0": 0.0, "r0c1": 0.0}


# -- what is left ----------------------------------------------------------------------------------


def grown():
    """A host with a fossil in r0c0 and an undecided seed in r0c1, trained and measured."""
    population = Population(POINTS, [3])
    script = {0: PLANT, 2: KEEP, 3: ALSO}
    for step in range(6):
        population.train_epoch()
        population.evaluate()
        population.apply(0, script.get(step, WAIT))
        population.tick()
    population.train_epoch()
    population.evaluate()
    return population


def test_what_is_left_is_measured_as_the_harvest_and_nothing_changes():
    population = grown()
    (run,) = population.runs
    before = {name: tensor.clone() for name, tensor in run.tensors().items()}
    score = score_examples(run, run.splits.validation)
    remains = population.measure_remains(0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors().items())
    assert torch.equal(score_examples(run, run.splits.validation), score)
    assert remains.left_out == ("r0c1",)
    assert run.reading.held_out_loss == remains.loss != float(score[0].mean())
    network = harvest(run.model).eval()
    inputs, targets = run.splits.validation.gather(torch.arange(len(run.splits.validation)))
    with torch.no_grad():
        losses, correct = run.task.score(network(inputs), targets)
    assert remains.loss == pytest.approx(float(losses.double().mean()), abs=1e-6)
    assert remains.accuracy == pytest.approx(float(correct.double().mean()))


def test_every_fossil_is_measured_without_the_undecided_seeds():
    population = grown()
    (run,) = population.runs
    ((position, gain),) = population.measure_remains(0).contributions.items()
    assert (position.slot_id, position.number) == ("r0c0", 0)
    bare = harvest(run.model).eval()
    run.model.act((OP_CULL, 1, 0, 0))
    with run.model.fossil_off("r0c0", 0):
        without = float(score_examples(run, run.splits.validation)[0].mean())
    inputs, targets = run.splits.validation.gather(torch.arange(len(run.splits.validation)))
    with torch.no_grad():
        whole = float(run.task.score(bare(inputs), targets)[0].double().mean())
    assert gain.mean == pytest.approx(without - whole, abs=1e-6)


def test_the_last_measurement_is_charged_and_a_host_that_did_not_grow_has_none():
    population = grown()
    (run,) = population.runs
    before = run.ledger.flops
    population.measure_remains(0)
    closing = run.ledger.phases["closing"]
    assert closing.examples == 2 * len(run.splits.validation)
    assert run.ledger.flops - before == closing.flops > 0
    assert closing.seconds > 0
    bare = Population(POINTS, [3])
    bare.train_epoch()
    bare.evaluate()
    assert bare.measure_remains(0) is None
    assert bare.runs[0].ledger.phases["closing"].flops == 0


# -- pay -------------------------------------------------------------------------------------------


def earned(env, policy):
    """The sum of all rewards of host 0, and the last step."""
    lived = play(env, policy)
    return sum(step.rewards[0] for step in lived), lived[-1]


def test_keeping_pays_what_is_kept_and_waiting_pays_nothing(twins):
    """The network with the undecided seed in it is as good; it is not what the episode leaves."""
    kept = grow(BLOBS, 1, twins, seeds=[1], weights=PAYS, gamma=1.0)
    waits = grow(BLOBS, 1, twins, seeds=[1], weights=PAYS, gamma=1.0)
    paid, last = earned(kept, scripted({0: PLANT, 9: KEEP}))
    unpaid, last_waiting = earned(waits, scripted({0: PLANT}))
    assert paid == pytest.approx(5.0), "more than the bound is saved"
    assert unpaid < 0.5
    (left,) = kinds(last.info["events"][0], RemainsMeasured)
    (left_waiting,) = kinds(last_waiting.info["events"][0], RemainsMeasured)
    assert (left.left_out, left_waiting.left_out) == ([], ["r0c0"])
    assert left.held_out_accuracy > 0.95
    assert kept.accuracy[0] == left.held_out_accuracy
    assert waits.accuracy[0] == left_waiting.held_out_accuracy < 0.6


@pytest.mark.parametrize("family", ["contribution", "lead", "loss"])
def test_every_family_reads_the_network_that_an_episode_leaves(family, twins):
    env = grow(BLOBS, 1, twins, seeds=[1], weights=FAMILIES[family])
    kept, _ = earned(env, scripted({0: PLANT, 9: KEEP}))
    undecided, _ = earned(env, scripted({0: PLANT}))
    assert undecided < 0.6 < 3.0 < kept


def paid_within_the_lead(seen, lived):
    """What host 0 is paid in the end, never above its lead on the way."""
    paid = 0.0
    for worth, step in zip(seen[1:], lived[1:], strict=True):
        paid += step.rewards[0]
        assert paid <= worth.lead + 1e-9
    return paid


def test_seeds_that_lean_on_each_other_never_earn_more_than_the_lead(twins):
    """Without one of them the other is of little use, so each seems to be worth nearly all."""
    env = grow(BLOBS, 1, twins, seeds=[1], weights=PAYS, gamma=1.0)
    script = {0: (OP_GERMINATE, 0, LORA, 0), 1: ALSO, 9: KEEP_OTHER, 10: KEEP}
    seen, lived = worths(env, scripted(script))
    assert max(sum(worth.contributions.values()) - worth.lead for worth in seen) > 1.0
    assert paid_within_the_lead(seen, lived) > 3.0


def linear_classes():
    """The examples of `blobs` with classes that a line tells apart: the host needs no seed."""
    splits = BLOBS.load(None)

    def relabelled(split):
        return replace(split, targets=(split.inputs[:, 0] > 0).long())

    return replace(splits, train=relabelled(splits.train), validation=relabelled(splits.validation))


def test_a_seed_that_the_host_merely_comes_to_depend_on_earns_no_more_than_the_lead(tmp_path):
    """Removing it costs loss, because the host has learnt with it; without it the host would have
    learnt as well.
    """
    env = grow(BLOBS, 1, tmp_path, seeds=[1], weights=PAYS, gamma=1.0, splits=linear_classes())
    seen, lived = worths(env, scripted({0: PLANT, 9: KEEP}))
    depends = seen[2]
    assert depends.contributions["r0c0"] > 0.3 > 0.0 > depends.lead
    assert share_out(depends.contributions, depends.lead).by_slot["r0c0"] == 0.0
    assert lived[2].rewards[0] + lived[1].rewards[0] == pytest.approx(depends.lead)
    assert seen[-1].contributions["r0c0"] > 0.15
    assert abs(paid_within_the_lead(seen, lived)) < 0.1


def test_a_slot_that_is_off_in_a_part_of_the_hosts_is_paid_alike(twins):
    """Parts of an environment share the books of their hosts."""
    env = grow(POINTS, 2, twins, seeds=[3, 4])
    part = env._part(range(1, 2))
    play(env, always(WAIT), steps=0)
    assert part.books[0] is env.books[1]


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_a_discount_outside_its_range_is_refused(gamma, twins):
    with pytest.raises(SettingError, match="gamma"):
        grow(POINTS, 1, twins, gamma=gamma)
