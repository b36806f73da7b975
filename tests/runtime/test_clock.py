"""Compute as the clock:

budgets in FLOPs as torch counts them, shares, steps, rates, and who pays for measuring.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.episodes import Episodes
from esper.kasmina.pricing import HostFlops
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.lifecycle import StageLengths
from esper.runtime.charges import (
    closing_passes,
    learning_flops,
    most_seed_charges,
    network_flops,
)
from esper.runtime.config import TaskConfig
from esper.runtime.counterfactuals import measured_slots
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import FossilJudged, HostEpoch
from runtime.clocked import CNN, RESNET, TEXT
from runtime.episodes import GERMINATE, act, differing, keep_measured, play, print_of

PLANS = {
    "gpt": (TEXT, {0: ("r0c0", "copy"), 2: ("r0c1", "copy_zero"), 3: ("r0c0", "copy")}),
    "gpt with live copies": (
        replace(TEXT, compute=0.8, lengths=StageLengths(ramp=2)),
        {0: ("r0c0", "copy"), 1: ("r0c1", "copy")},
    ),
    "resnet": (RESNET, {0: ("r0c1", "copy_zero"), 1: ("r0c5", "copy")}),
    "cnn": (CNN, {0: ("r0c0", "conv_light"), 1: ("r0c1", "norm"), 6: ("r0c0", "conv_small")}),
    "cnn with incubation": (
        replace(CNN, lengths=StageLengths(training=2)),
        {0: ("r0c0", "conv_light"), 1: ("r0c1", "conv_small")},
    ),
}
SLOW = {"gpt", "resnet", "cnn with incubation"}
every_plan = pytest.mark.parametrize(
    "plan", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PLANS]
)


def grown(task, plan, seeds=(1,)):
    """Episodes that were played to their end, and the events of the first host."""
    return play_out(Population(task, list(seeds)), plan)


def play_out(population, plan):
    episodes, events, task = Episodes(population), [], population.task
    for epoch in range(task.epochs):
        events += episodes.train()[0]
        if epoch in plan:
            act(episodes.population, 0, GERMINATE, *plan[epoch])
        keep_measured(episodes.population)
        episodes.tick()
    return episodes.population, events


def epochs_of(events):
    return [event for event in events if isinstance(event, HostEpoch)]


# -- FLOPs -----------------------------------------------------------------------------------------


@every_plan
def test_the_ledger_agrees_with_torch_about_a_whole_episode(plan):
    task, script = PLANS[plan]
    population, counter = Population(task, [1]), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        _, events = play_out(population, script)
    run = population.runs[0]
    assert run.ledger.flops == pytest.approx(counter.get_total_flops(), rel=0.001)
    assert sum(len(slot.fossils) for slot in run.slots) or any(
        isinstance(event, FossilJudged) for event in events
    )


@pytest.mark.parametrize("task", [TEXT, CNN], ids=["gpt", "cnn"])
def test_a_step_is_charged_what_torch_counts_for_it(task):
    population = Population(task, [1])
    run = population.runs[0]
    run.begin_epoch()
    batch = run.plan.next_batch()
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        run.learn(*batch)
    assert (
        run.plan.size * learning_flops(run.model, population.runs[0].flops)
        == counter.get_total_flops()
    )


# -- shares ----------------------------------------------------------------------------------------


@every_plan
def test_an_episode_uses_its_budget_and_not_more(plan):
    population, events = grown(*PLANS[plan])
    clock, run = population.runs[0].clock, population.runs[0]
    step = run.plan.size * learning_flops(run.model, population.runs[0].flops)
    left = clock.budget - run.ledger.flops
    assert left >= 0
    judged = sum(isinstance(event, FossilJudged) for event in events)
    unused = (
        (judged + 1)
        * len(run.splits.validation)
        * network_flops(run.model, population.runs[0].flops)
        if judged
        else 0
    )
    assert left < step + unused  # pruning is set aside at its highest price


@every_plan
def test_what_a_share_leaves_is_carried_over(plan):
    """By the end of each decision no more is used than was due, and less than a step is left."""
    task, script = PLANS[plan]
    task = replace(task, prunes=False)
    episodes = Episodes(Population(task, [1]))
    clock, run = episodes.population.runs[0].clock, episodes.population.runs[0]
    for epoch in range(task.epochs):
        step = run.plan.size * learning_flops(run.model, episodes.population.runs[0].flops)
        episodes.train()
        assert 0 <= clock.due(epoch) - run.ledger.flops < (3 if task.lengths.training else 1) * step
        assert run.plan.steps
        if epoch in script:
            act(episodes.population, 0, GERMINATE, *script[epoch])
        keep_measured(episodes.population)
        episodes.tick()
    assert clock.due(task.epochs - 1) == clock.budget


def test_a_larger_network_sees_fewer_examples():
    _, alone = grown(TEXT, {})
    _, large = grown(TEXT, {0: ("r0c0", "copy"), 1: ("r0c1", "copy")})
    steps = [[event.steps for event in epochs_of(events)] for events in (alone, large)]
    assert steps[0][0] == steps[1][0]
    assert steps[0][1] > steps[1][1] > steps[1][2] > 0
    assert max(steps[0]) - min(steps[0]) <= 1


def test_a_share_that_only_pays_for_measuring_has_no_step_and_is_carried_over():
    task = replace(TEXT, batch=64, epoch_examples=64, compute=1.03, prunes=False)
    _, events = grown(task, {0: ("r0c0", "copy"), 1: ("r0c1", "copy")})
    steps = [event.steps for event in epochs_of(events)]
    assert 0 in steps
    assert any(steps[steps.index(0) :])
    losses = [event.train_loss for event in epochs_of(events)]
    assert losses[steps.index(0)] == losses[steps.index(0) - 1]
    assert all(loss is not None for loss in losses)


def test_hosts_side_by_side_stay_in_step_and_do_not_touch_each_other():
    script = {0: ("r0c0", "copy"), 2: ("r0c1", "copy")}
    together, _ = grown(TEXT, script, seeds=[1, 2])
    assert [run.epoch for run in together.runs] == [TEXT.epochs] * 2
    assert together.runs[0].plan.steps != together.runs[1].plan.steps
    assert differing(print_of(together, 0), print_of(grown(TEXT, script)[0])) == []
    assert differing(print_of(together, 1), print_of(grown(TEXT, {}, seeds=[2])[0])) == []


def test_a_snapshot_goes_back_to_the_same_share():
    population = Population(TEXT, [1])
    play(population, 2)
    kept = population.snapshot()
    play(population, 2, start=2)
    first = print_of(population)
    population.restore(kept)
    play(population, 2, start=2)
    assert differing(first, print_of(population)) == []


# -- the unit --------------------------------------------------------------------------------------


def test_one_is_the_reference_run_of_code():
    task = get_task("code")
    build, examples = task.reference
    assert examples == 3000 * 64
    blocks, host = build().blocks, task.build_host().blocks
    assert (len(blocks), len(host)) == (8, 2)
    population = Population(replace(TEXT, compute=0.6), [1])
    whole = HostFlops.of_task(TEXT.reference[0], population.runs[0].splits.train.example())
    assert population.runs[0].clock.budget == round(0.6 * 60 * 8 * whole.learnt)


def test_one_is_the_host_alone_for_all_epochs_elsewhere():
    population = Population(replace(RESNET, compute=1.0), [1])
    steps, size = 6, 16
    assert (
        population.runs[0].clock.budget
        == RESNET.epochs * steps * size * population.runs[0].flops.learnt
    )


def test_a_static_network_pays_for_its_last_measurement_only():
    population = Population(TEXT, [1])
    run = population.runs[0]
    run.is_static = True
    for _ in range(TEXT.epochs):
        population.train_epoch()
        population.evaluate()
        population.tick()
    validation, score = (run.ledger.phases[name].examples for name in ("validation", "score"))
    assert (validation, score) == (len(run.splits.validation), 32)
    paid = grown(TEXT, {})[0].runs[0]
    assert paid.ledger.phases["validation"].examples == TEXT.epochs * len(run.splits.validation)
    assert paid.ledger.phases["training"].examples < run.ledger.phases["training"].examples


def test_counterfactuals_and_pruning_are_paid_from_the_budget():
    task, script = PLANS["gpt with live copies"]
    population, events = grown(replace(task, held_out=4), script)
    _, thorough = grown(replace(task, held_out=16), script)
    assert sum(event.steps for event in epochs_of(thorough)) < sum(
        event.steps for event in epochs_of(events)
    )
    assert any(isinstance(event, FossilJudged) for event in events)
    assert population.runs[0].ledger.flops <= population.runs[0].clock.budget


def test_a_static_host_sets_its_one_measurement_aside_so_that_its_rate_falls_to_the_end():
    population = Population(replace(TEXT, held_out=16), [1])
    run, rates = population.runs[0], []
    run.is_static = True
    for _ in range(population.task.epochs):
        population.train_epoch()
        population.evaluate()
        rates.append(run.rates[-1])
    assert rates[-1] < 0.15 * TEXT.lr
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.95 < run.ledger.flops / population.runs[0].clock.budget <= 1


def test_a_budget_that_measuring_would_use_up_is_refused_before_anything_is_trained():
    with pytest.raises(SettingError, match="has grown"):
        Population(replace(get_task("blobs"), clock="compute", compute=1.0), [1])


def test_measuring_every_slot_for_good_is_thought_of_before_anything_is_trained():
    """Probation has no end: seeds everywhere that wait are measured in every decision."""
    tight = replace(get_task("digits"), clock="compute", budget=1.6, compute=0.14)
    population = Population(tight, [1])  # a rule keeps what was measured in the same decision
    with pytest.raises(SettingError, match=r"decision 1 .*up to 9\.\d+e\+06 once it has grown"):
        population.expect_undecided([0])
    # without a ramp a seed is a fossil from its first epoch on, which no measurement looks at
    Population(replace(tight, lengths=StageLengths(ramp=0)), [1]).expect_undecided([0])


@pytest.mark.parametrize(("max_seeds", "passes"), [(None, 2), (3, 2), (1, 1)])
def test_a_measurement_takes_a_pass_for_each_slot_that_can_hold_a_seed(max_seeds, passes):
    population = Population(replace(CNN, max_seeds=max_seeds), [1])
    charges = most_seed_charges(population.runs[0], population.runs[0].flops)
    assert [charge.examples for charge in charges] == [CNN.held_out] * passes
    assert charges[0].flops_each == population.runs[0].flops.after["r0c0"]


@pytest.mark.slow
def test_waiting_with_seeds_everywhere_lasts_to_the_end_of_the_least_budget():
    task = replace(get_task("digits"), clock="compute", budget=1.6, compute=0.21)
    population = Population(task, [1])
    for epoch in range(task.epochs):
        population.train_epoch()
        population.evaluate()
        if epoch < 2:
            act(population, 0, GERMINATE, f"r0c{epoch}", ("conv_light", "norm")[epoch])
        population.tick()
    run = population.runs[0]
    assert len(measured_slots(run)) == 2
    assert run.ledger.flops <= population.runs[0].clock.budget


def test_what_is_left_at_the_end_is_set_aside():
    population = Population(replace(CNN, prunes=False), [1])
    run = population.runs[0]
    act(population, 0, GERMINATE, "r0c0", "conv_light")
    assert closing_passes(run, measures_left=False) == 0
    assert closing_passes(run, measures_left=True) == 1
    run.plan.steps = 0
    population.runs[0].clock.plan(run)
    before = run.plan.steps
    population.runs[0].clock.measures_left = True
    population.runs[0].clock.plan(run)
    assert run.plan.steps < before


def test_scores_of_a_decision_with_few_examples_repeat_those():
    population = Population(TEXT, [1])
    run = population.runs[0]
    run.plan.steps = 1
    run.plan.draw()
    rows = run.plan.rows.tolist()
    assert rows[: run.plan.size] == rows[run.plan.size : 2 * run.plan.size]


# -- rates -----------------------------------------------------------------------------------------


def test_the_rate_follows_the_share_that_is_used():
    task = replace(TEXT, lr=1.0, warmup=0.1, decay=0.4)
    assert [task.rate_at(share) for share in (0.0, 0.05, 0.1, 0.6, 0.8, 1.0, 1.1)] == pytest.approx(
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    )


def test_every_step_has_the_rate_of_its_share(monkeypatch):
    task, seen = replace(TEXT, warmup=0.2), []
    population = Population(task, [1])
    run, step = population.runs[0], population.runs[0].optimizer.step
    monkeypatch.setattr(
        run.optimizer,
        "step",
        lambda *a: (seen.append(run.optimizer.param_groups[0]["lr"]), step(*a)),
    )
    for _ in range(task.epochs):
        population.train_epoch()
        assert run.reading.lr == seen[-1]
        population.evaluate()
    assert len(seen) * run.plan.size == run.ledger.phases["training"].examples
    peak = seen.index(max(seen))
    assert seen[: peak + 1] == sorted(seen[: peak + 1])
    assert seen[peak:] == sorted(seen[peak:], reverse=True)
    assert len(set(seen)) > task.epochs
    assert seen[0] < 0.1 * task.lr
    assert max(seen) == task.lr
    assert seen[-1] < 0.1 * task.lr


def test_slots_learn_at_the_rate_of_the_host():
    population, _ = grown(TEXT, {0: ("r0c0", "copy")})
    assert len({group["lr"] for group in population.runs[0].optimizer.param_groups}) == 1


def test_a_warm_up_is_not_a_rate_that_has_fallen():
    task = replace(TEXT, warmup=0.5, epochs=40)
    assert task.rate(0) < 0.1 * task.lr
    low = [epoch for epoch in range(41) if task.is_rate_low(epoch)]
    assert low == [
        epoch for epoch in range(20, 41) if epoch == 40 or task.rate(epoch) <= 0.1 * task.lr
    ]
    assert low[0] < 40


def test_fossils_are_judged_once_the_rate_has_fallen():
    task = replace(TEXT, epochs=10, decay=0.6, compute=2.0)
    due = next(epoch for epoch in range(11) if task.is_rate_low(epoch))
    _, events = grown(task, {0: ("r0c0", "copy"), 1: ("r0c1", "copy")})
    assert {event.epoch for event in events if isinstance(event, FossilJudged)} == {due}
    assert due < 10
    assert epochs_of(events)[-1].steps > 0


# -- what policies see -----------------------------------------------------------------------------


def test_progress_is_the_share_of_the_compute_that_is_used():
    population, events = grown(TEXT, {0: ("r0c0", "copy")})
    shares = [event.share for event in epochs_of(events)]
    assert shares == sorted(shares)
    assert shares[-1] == population.runs[0].ledger.flops / population.runs[0].clock.budget
    for epoch, share in enumerate(shares):
        assert share <= (epoch + 1) / TEXT.epochs
    episodes = Episodes(Population(TEXT, [1]))
    told = episodes.train()[0]
    assert episodes.trackers[0].tracked.last.progress == epochs_of(told)[0].share
    assert epochs_of(told)[0].share != 1 / TEXT.epochs


# -- refusals --------------------------------------------------------------------------------------


def test_a_budget_below_one_decision_is_refused():
    with pytest.raises(SettingError, match=r"compute 0\.001.*8 decisions.*one step"):
        Population(replace(TEXT, compute=0.001), [1])
    with pytest.raises(SettingError, match=r"compute 0\.1 .*measurement"):
        Population(replace(TEXT, compute=0.1, held_out=90), [1])


def test_an_unknown_clock_is_refused():
    with pytest.raises(UnknownNameError, match=r"clock 'steps'.*compute, epochs"):
        replace(TEXT, clock="steps")


@pytest.mark.parametrize("name", ["compute", "decay", "warmup"])
def test_a_plan_without_length_is_refused(name):
    with pytest.raises(SettingError, match=name):
        replace(TEXT, **{name: 0.0})


def test_giving_compute_sets_the_clock():
    build = partial(TaskConfig.of)
    assert build({"name": "digits"}).build().clock == "epochs"
    found = build({"name": "digits", "compute": 0.5}).build()
    assert (found.clock, found.compute) == ("compute", 0.5)
    assert build({"name": "code"}).build().clock == "compute"
    assert build({"name": "code", "clock": "epochs"}).build().clock == "epochs"
    assert build({"name": "digits", "clock": "compute", "decay": 0.5}).build().decay == 0.5


@pytest.mark.parametrize("values", [{"compute": 1.0}, {"decay": 0.5}], ids=str)
def test_a_clock_that_contradicts_its_settings_is_refused(values):
    with pytest.raises(SettingError, match=r"epochs, .*decay"):
        TaskConfig.of({"name": "code", "clock": "epochs", **values}).build()
    if "decay" in values:
        with pytest.raises(SettingError, match=r"epochs, .*decay"):
            TaskConfig.of({"name": "digits", **values}).build()


def test_code_steps_as_it_was_measured():
    optimizer = Population(TEXT, [1]).runs[0].optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    task = get_task("code")
    assert (task.lr, task.clip_norm, task.decay, task.batch) == (4e-3, 1.0, 0.2, 64)
