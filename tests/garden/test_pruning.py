"""Late pruning in a loop of one's own:

by itself when the rate has fallen, or when it is asked for.
"""

import warnings

import pytest
import torch

import esper
from esper.leyline.errors import MeasurementError
from esper.leyline.lifecycle import StageLengths
from esper.telemetry.events import FossilJudged, GrowthHint, HostEpoch
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, random_images, script, train_epoch

IMAGES = random_images(32)
LENGTHS = StageLengths(ramp=0)
"""kept at once, so that fossils are there from the first decision on"""


def judging(garden, worth):
    """Losses that every fossil in the network lowers by `worth`."""

    def evaluate():
        slots = garden.model.slots.values()
        on = sum(
            number not in slot.left_out for slot in slots for number in range(len(slot.fossils))
        )
        return torch.linspace(1.0, 2.0, 8) - worth * on

    return evaluate


def loop(garden, rates, worth, evaluate=None):
    """Train an epoch at each rate; the rate of the next one is set before the step.

    Returns the verdicts by epoch.
    """
    optimizer = garden.model.link.optimizer
    found = []
    for epoch, rate in enumerate(rates):
        train_epoch(garden.model, optimizer, epoch, IMAGES)
        for group in optimizer.param_groups:
            group["lr"] = rate
        found.append(
            [
                e.is_kept
                for e in garden.step(evaluate or judging(garden, worth))
                if isinstance(e, FossilJudged)
            ]
        )
    return found


def grow(**options):
    return grow_cnn({0: PLANT_FIRST, 1: (1, 1, 2, 0)}, lengths=LENGTHS, lr=0.1, **options)


@pytest.mark.parametrize(("worth", "left"), [(1.0, 2), (-1.0, 0)])
def test_fossils_are_judged_once_at_the_first_step_with_a_low_rate(worth, left):
    garden = grow()
    found = loop(garden, [0.1, 0.1, 0.02, 0.01, 0.001, 0.1, 0.001], worth)
    assert found == [[], [], [], [worth > 0] * 2, [], [], []]
    assert garden.model.fossilized_seeds == left
    assert [e.slot for e in garden.history if isinstance(e, FossilJudged)] == ["r0c0", "r0c1"]


def test_what_was_judged_is_told_even_if_the_policy_fails_then():
    class Failing:
        def decide(self, observation, masks, reports, memory, signals):
            if garden.is_pruned and failures:
                raise RuntimeError(failures.pop())
            return script({0: PLANT_FIRST})(None).decide(
                observation, masks, reports, memory, signals
            )

    failures = ["once"]
    garden = grow_cnn(policy=lambda facts: Failing(), lengths=LENGTHS, lr=0.1)
    with pytest.raises(RuntimeError, match="once"):
        loop(garden, [0.1, 0.1, 0.01], -1.0)
    assert garden.model.fossilized_seeds == 0
    loop(garden, [0.01], -1.0)
    assert [e.slot for e in garden.history if isinstance(e, FossilJudged)] == ["r0c0"]
    assert [e.epoch for e in garden.history if isinstance(e, HostEpoch)] == [1, 2, 3, 4]


def test_the_epochs_record_is_of_the_network_that_goes_on():
    garden = grow()
    loop(garden, [0.1, 0.1, 0.01], -1.0)
    last = [e for e in garden.history if isinstance(e, HostEpoch)][-1]
    assert (last.params, last.held_out_loss) == (garden.model.host_params, pytest.approx(1.5))


def test_while_it_warms_up_a_rate_has_not_fallen():
    garden = grow()
    for group in garden.model.link.optimizer.param_groups:
        group["lr"] = 0.001
    garden.model.link.peak_rate = 0.1
    assert loop(garden, [0.002, 0.004, 0.1, 0.1, 0.01], -1.0) == [[], [], [], [], [False] * 2]


def test_a_scheduler_that_drops_to_a_tenth_is_enough():
    garden = grow(attach=False)
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3], gamma=0.1)
    garden.attach(optimizer, scheduler)
    found = []
    for epoch in range(4):
        train_epoch(garden.model, optimizer, epoch, IMAGES)
        scheduler.step()
        found.append(sum(isinstance(e, FossilJudged) for e in garden.step(judging(garden, 1.0))))
    assert found == [0, 0, 2, 0]


def test_with_constant_rates_it_happens_when_asked_for():
    garden = grow()
    assert loop(garden, [0.1] * 3, -1.0) == [[]] * 3
    events = garden.prune(judging(garden, -1.0))
    assert [(type(e), e.epoch, e.is_kept) for e in events] == [(FossilJudged, 3, False)] * 2
    assert garden.history[-2:] == events
    assert garden.model.total_params == garden.model.host_params
    assert garden.prune(judging(garden, -1.0)) == []


@pytest.mark.parametrize(("worth", "left"), [(1.0, 2), (-1.0, 0)])
def test_at_a_constant_rate_fossils_are_judged_after_the_last_epoch_that_is_known(worth, left):
    garden = grow(epochs=4)
    verdicts = loop(garden, [0.1] * 6, worth)
    assert verdicts == [[], [], [], [worth > 0] * 2, [], []]
    assert garden.model.fossilized_seeds == left
    assert garden.is_pruned


def test_a_rate_that_fell_before_the_last_epoch_is_the_one_time():
    assert loop(grow(epochs=4), [0.1, 0.1, 0.001, 0.001], 1.0) == [[], [], [True] * 2, []]


def unjudged(garden):
    """What a harvest says of fossils that were never judged: the hint, and the warning of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        garden.harvest()
    hints = [event.text for event in garden.history if isinstance(event, GrowthHint)]
    assert [str(warning.message) for warning in caught] == hints
    assert {warning.filename for warning in caught} <= {__file__}
    return hints


def test_a_harvest_of_fossils_that_were_never_judged_warns_and_names_them():
    garden = grow()
    loop(garden, [0.1] * 3, 1.0)
    (hint,) = unjudged(garden)
    for part in ("r0c0 (layer1)", "r0c1 (layer2)", "garden.prune(evaluate)", "epochs="):
        assert part in hint
    garden.prune(judging(garden, 1.0))
    garden.history = [event for event in garden.history if not isinstance(event, GrowthHint)]
    assert unjudged(garden) == []


def test_a_fossil_that_came_after_the_others_were_judged_is_named_alone():
    garden = grow_cnn({0: PLANT_FIRST, 3: (1, 1, 2, 0)}, lengths=LENGTHS, lr=0.1)
    loop(garden, [0.1, 0.1, 0.01, 0.01, 0.01], 1.0)
    garden.history = [event for event in garden.history if not isinstance(event, GrowthHint)]
    (hint,) = unjudged(garden)
    assert "r0c1 (layer2)" in hint
    assert "r0c0" not in hint


def test_every_fossil_of_a_slot_that_was_never_judged_is_named_and_no_sham():
    blueprints = ["conv_light", "norm", "sham"]
    choices = {0: PLANT_FIRST, 2: (1, 0, 2, 0), 4: (1, 0, 3, 0)}
    garden = grow_cnn(choices, lengths=LENGTHS, lr=0.1, max_seeds=3, blueprints=blueprints)
    loop(garden, [0.1] * 6, 1.0)
    assert garden.model.slot("r0c0").fossil_names == ["conv_light", "norm", "sham"]
    (hint,) = unjudged(garden)
    assert "conv_light in r0c0 (layer1), norm in r0c0 (layer1)." in hint


def test_a_harvest_does_not_advise_what_was_done_already():
    """The rate fell first, so the last known epoch judged nothing."""
    garden = grow_cnn({2: PLANT_FIRST}, lengths=LENGTHS, lr=0.1, epochs=4)
    assert loop(garden, [0.1, 0.01, 0.01, 0.01], 1.0) == [[]] * 4
    garden.history = [event for event in garden.history if not isinstance(event, GrowthHint)]
    (hint,) = unjudged(garden)
    assert "garden.prune(evaluate)" in hint
    assert "epochs=" not in hint


@pytest.mark.parametrize("case", ["nothing grew", "judged", "removed", "not wanted"])
def test_a_harvest_says_nothing_where_nothing_is_left_to_judge(case):
    if case == "nothing grew":
        garden = grow_cnn({}, lengths=LENGTHS, lr=0.1)
    elif case == "not wanted":
        settings = esper.GrowthSettings(lengths=LENGTHS, prunes=False)
        garden = esper.grow(
            CNN(), slots=["layer1"], example=IMAGES[:2], policy="schedule", settings=settings
        )
        garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    else:
        garden = grow(epochs=3)
    loop(garden, [0.1] * 3, -1.0 if case == "removed" else 1.0)
    garden.history = [event for event in garden.history if not isinstance(event, GrowthHint)]
    assert unjudged(garden) == []


def test_without_the_setting_nothing_is_judged_by_itself():
    settings = esper.GrowthSettings(lengths=LENGTHS, prunes=False)
    garden = esper.grow(
        CNN(), slots=["layer1"], example=random_images(2), policy="schedule", settings=settings
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    assert loop(garden, [0.1] * 3 + [0.001] * 2, -1.0) == [[]] * 5
    assert garden.model.fossilized_seeds


def test_what_it_costs_is_a_pass_per_fossil_without_the_fossil():
    garden = grow()
    loop(garden, [0.1] * 3, 1.0)
    examples, flops = (
        getattr(garden.ledger.phases["counterfactual"], name) for name in ("examples", "flops")
    )
    garden.prune(judging(garden, 1.0))
    cost = garden.ledger.phases["counterfactual"]
    assert cost.examples - examples == 2 * 8
    assert 0 < (cost.flops - flops) / 8 < 2 * (garden.flops + sum(p.flops for p in prices(garden)))


def prices(garden):
    slots = garden.model.slots.values()
    return [slot.prices[name, False] for slot in slots for name in slot.fossil_names]


def test_that_it_happened_is_saved(tmp_path):
    gardens = []
    for rates in ([0.1, 0.1, 0.01], [0.1, 0.1, 0.1]):
        garden = grow()
        loop(garden, rates, 1.0)
        garden.save(tmp_path / "save")
        again = esper.load(tmp_path / "save", CNN(), policy=script({}))
        again.attach(torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9))
        gardens.append(again)
    assert [loop(garden, [0.001], 1.0) for garden in gardens] == [[[]], [[True] * 2]]


def test_a_network_pruned_in_a_real_loop_is_harvested_without_what_left():
    garden = grow(scale=1.0)

    def evaluate():
        return losses_of(garden.model, IMAGES)

    loop(garden, [0.1] * 3, None, evaluate)
    with torch.no_grad():
        garden.model.slot("r0c1").fossils[0].scale.fill_(50.0)  # harm beyond doubt
    garden.prune(evaluate)
    assert not len(garden.model.slot("r0c1").fossils)
    plain = garden.harvest().eval()
    with torch.no_grad():
        assert torch.equal(plain(IMAGES), garden.model.eval()(IMAGES))


def test_a_thing_that_is_no_function_is_refused():
    with pytest.raises(MeasurementError, match="Tensor; pass"):
        grow().prune(torch.ones(3))
