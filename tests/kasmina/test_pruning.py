"""Late pruning of one network:

what is judged, in which order, what leaves, and that nothing else moves.
"""

import copy

import pytest
import torch

from esper.kasmina.pruning import find_judged, prune
from esper.leyline.errors import MeasurementError
from esper.leyline.factored_actions import OP_GERMINATE
from esper.leyline.legality import refuse
from kasmina.gardens import cnn_host, grow_cnn, images, keep, output, put_on_probation, train

INPUTS = images()
PLACES = (("r0c0", "norm"), ("r0c0", "conv_small"), ("r0c1", "conv_light"), ("r0c0", "norm"))
ORDER = [("r0c0", 2), ("r0c0", 1), ("r0c0", 0), ("r0c1", 0)]


def grown(places=PLACES, **options):
    """A network with fossils, each trained a little."""
    model = grow_cnn(scale=1.0, blueprints=("norm", "conv_small", "conv_light", "sham"), **options)
    for slot_id, blueprint in places:
        put_on_probation(model, slot_id, blueprint, "linear", INPUTS)
        keep(model, slot_id)
    train(model, INPUTS)
    return model


def fossils_of(model):
    return [list(model.slot(slot_id).fossils) for slot_id in model.slot_config.slot_ids]


def by_worth(model, worth):
    """Held-out losses by fiat: each fossil lowers them by what it is worth."""
    every = [fossil for own in fossils_of(model) for fossil in own]
    seen = []

    def measure():
        on = [
            fossil
            for slot in map(model.slot, model.slot_config.slot_ids)
            for number, fossil in enumerate(slot.fossils)
            if number not in slot.left_out
        ]
        seen.append([every.index(fossil) for fossil in on])
        spread = torch.linspace(0.9, 1.1, 5, dtype=torch.double)
        return (10.0 - sum(worth[every.index(fossil)] for fossil in on) * spread)[None]

    return measure, seen


def judge(model, *worth):
    measure, seen = by_worth(model, worth)
    verdicts, left = prune(model, measure, measure())
    return verdicts, left, seen


def test_what_helps_stays_and_what_does_not_leaves():
    model = grown()
    (first, _second, _third), (fourth,) = fossils_of(model)
    verdicts, left, _ = judge(model, 1.0, -1.0, 0.0, 0.5)
    assert fossils_of(model) == [[first], [fourth]]
    assert [model.slot(slot_id).fossil_names for slot_id in ("r0c0", "r0c1")] == [
        ["norm"],
        ["conv_light"],
    ]
    assert [(v.slot_id, v.blueprint_id, v.is_kept) for v in verdicts] == [
        ("r0c0", "norm", False),
        ("r0c0", "conv_small", False),
        ("r0c0", "norm", True),
        ("r0c1", "conv_light", True),
    ]
    assert [v.contribution.mean for v in verdicts] == pytest.approx([0.0, -1.0, 1.0, 0.5])
    assert left.mean() == pytest.approx(10.0 - 1.5)


def test_newest_come_first_and_the_next_is_judged_without_those_that_left():
    model = grown()
    assert find_judged(model) == ORDER
    _, _, seen = judge(model, 1.0, -1.0, 1.0, -1.0)
    assert seen == [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3], [2, 3], [0, 2]]


def test_without_its_fossil_a_network_is_what_it_would_be_and_then_is_again():
    model = grown()
    whole = output(model, INPUTS)
    bare = copy.deepcopy(model)
    bare.remove_fossil("r0c0", 1)
    with model.fossil_off("r0c0", 1):
        assert torch.equal(output(model, INPUTS), output(bare, INPUTS))
        with model.fossil_off("r0c0", -1):
            bare.remove_fossil("r0c0", 1)
            assert torch.equal(output(model, INPUTS), output(bare, INPUTS))
    assert torch.equal(output(model, INPUTS), whole)
    with pytest.raises(IndexError), model.fossil_off("r0c1", 1):
        pass


def test_a_removed_fossil_leaves_the_optimiser_and_the_state_of_all_others_is_untouched_to_the_bit():
    model = grown()
    optimizer = model.link.optimizer
    gone = list(model.slot("r0c0").fossils[1].parameters())
    before = {
        p: {key: torch.clone(value) for key, value in state.items()}
        for p, state in optimizer.state.items()
    }
    judge(model, 1.0, -1.0, 1.0, 1.0)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert not {id(p) for p in gone} & {
        id(p) for p in (*owned, *optimizer.state, *model.parameters())
    }
    assert {id(p) for p in owned} == {id(p) for p in model.parameters()}
    assert len(optimizer.state) == len(before) - len(gone)
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(value, before[parameter][key]) for key, value in state.items())
    train(model, INPUTS)


def test_a_removed_fossil_frees_its_parameters_and_its_place():
    model = grown((("r0c0", "conv_light"),), max_seeds=1)
    held = model.total_params
    assert refuse(OP_GERMINATE, "r0c1", "norm", "linear", model.view()) is not None
    judge(model, -1.0)
    assert (model.total_params, model.fossilized_params) == (model.host_params, 0)
    assert held > model.host_params
    assert refuse(OP_GERMINATE, "r0c1", "norm", "linear", model.view()) is None


def test_a_live_seed_and_the_state_of_its_slot_stay():
    model = grown()
    put_on_probation(model, "r0c0", "conv_small", "linear", INPUTS)
    seed, state = model.slot("r0c0").seed, model.slot("r0c0").state
    judge(model, -1.0, -1.0, -1.0, -1.0)
    assert model.fossilized_seeds == 0
    assert (model.slot("r0c0").seed, model.slot("r0c0").state) == (seed, state)


def test_what_was_built_in_or_has_no_effect_is_not_judged():
    model = grow_cnn(cnn_host(), blueprints=("norm", "sham"))
    model.build_in("r0c0", "norm")
    for slot_id, blueprint in (("r0c0", "norm"), ("r0c1", "sham")):
        put_on_probation(model, slot_id, blueprint, "linear", INPUTS)
        keep(model, slot_id)
    assert find_judged(model) == [("r0c0", 1)]
    (built_in, _grew), (sham,) = fossils_of(model)
    verdicts, _, seen = judge(model, -1.0, -1.0, -1.0)
    assert fossils_of(model) == [[built_in], [sham]]
    assert len(verdicts) == 1
    assert len(seen) == 2


def test_a_fossil_without_which_the_losses_are_not_finite_stays_unmeasured():
    model = grown((("r0c0", "norm"),))
    verdicts, _ = prune(model, lambda: torch.full((1, 5), torch.inf), torch.ones(1, 5))
    assert [(v.contribution, v.is_kept) for v in verdicts] == [(None, True)]
    assert model.fossilized_seeds == 1


def test_a_measurement_that_fails_leaves_the_network_as_it_was():
    model = grown()
    measure, seen = by_worth(model, (-1.0,) * 4)
    base, before = measure(), fossils_of(model)

    def fail():
        if len(seen) == 3:
            raise MeasurementError("broken")
        return measure()

    with pytest.raises(MeasurementError):
        prune(model, fail, base)
    assert fossils_of(model) == before
    assert all(slot.left_out == () for slot in model.slots.values())
