"""Growing in a loop of one's own:

the loop itself, evidence, limits, policies, shadow passes, hints, summaries.
"""

import math

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import MeasurementError, OptimizerError, SettingError, UnknownNameError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.telemetry.events import (
    ActionRefused,
    ActionTaken,
    GrowthHint,
    HostEpoch,
    SeedMeasured,
    StageChanged,
)
from user_models import (
    CNN,
    CULL_FIRST,
    KEEP_FIRST,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    script,
    stage_of,
    train_epoch,
    walk_to,
)

IMAGES, HELD_OUT = random_images(96, seed=1), random_images(96, seed=2)
PLANT_SECOND = (1, 1, 1, 0)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def readme_run():
    """The README's loop, once: garden and harvested network."""
    torch.manual_seed(0)
    garden = esper.grow(
        CNN(), slots=["layer1", "layer2"], example=IMAGES[:2], budget=2.0, policy="heuristic"
    )
    optimizer = torch.optim.AdamW(garden.parameters(), lr=2e-2)
    garden.attach(optimizer)
    for epoch in range(14):
        train_epoch(garden.model, optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    return garden, garden.harvest()


# -- the loop --------------------------------------------------------------------------------------


def test_the_readme_loop_leads_a_seed_through_a_whole_episode(readme_run):
    garden, _ = readme_run
    episodes = {(e.slot, e.before, e.after) for e in of(StageChanged, garden.history)}
    slot = next(slot for slot, _, after in episodes if after == "FOSSILIZED")
    moves = [("DORMANT", "GERMINATED"), ("GERMINATED", "BLENDING"), ("BLENDING", "PROBATIONARY")]
    assert {(slot, *move) for move in moves} <= episodes


def test_what_the_readme_loop_harvests_is_a_plain_module(readme_run):
    garden, plain = readme_run
    assert type(plain) is CNN
    assert not [m for m in plain.modules() if type(m).__module__.startswith("esper")]
    assert count_parameters(plain) > count_parameters(CNN())
    assert garden.model is not plain


def test_the_readme_loop_stays_within_its_budget(readme_run):
    garden, _ = readme_run
    assert max(e.params for e in of(HostEpoch, garden.history)) <= 2.0 * count_parameters(CNN())


def test_a_steps_events_are_returned_and_kept():
    garden = grow_cnn({0: PLANT_FIRST})
    garden.verbose = True
    first = garden.step(made_up(garden))
    second = garden.step(made_up(garden))
    assert garden.history == [*first, *second]
    assert {e.epoch for e in first} == {1}
    assert {e.epoch for e in second} == {2}
    assert garden.epoch == 2


def test_an_epoch_measured_names_the_mean_and_the_size():
    garden = grow_cnn()
    garden.step(lambda: torch.tensor([1.0, 2.0, 6.0]))
    (event,) = garden.history
    assert event == HostEpoch(0, 1, 3.0, count_parameters(CNN()), flops=garden.ledger.flops)


def test_stepping_leaves_training_mode_gradients_and_random_state_alone():
    garden = grow_cnn({0: PLANT_FIRST})
    garden.model.train()
    garden.model.host.layer2.eval()
    losses_of(garden.model, IMAGES).mean().backward()
    gradients = [p.grad.clone() for p in garden.model.host.parameters()]
    state = torch.get_rng_state()
    garden.step(lambda: losses_of(garden.model, HELD_OUT) + torch.rand(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert garden.model.host.layer1.training
    assert not garden.model.host.layer2.training
    assert all(
        torch.equal(p.grad, g)
        for p, g in zip(garden.model.host.parameters(), gradients, strict=True)
    )


def test_evaluate_sees_the_model_in_eval_mode_and_without_gradients():
    garden = grow_cnn()
    seen = []

    def evaluate():
        seen.append((garden.model.training, torch.is_grad_enabled()))
        return torch.ones(3)

    garden.step(evaluate)
    assert seen == [(False, False)]


# -- evidence --------------------------------------------------------------------------------------


def offs(garden, count=10):
    """Which slots were off at each call of evaluate, step by step."""
    steps = []
    for _ in range(count):
        calls = []

        def evaluate(calls=calls):
            slots = garden.model.slots.items()
            calls.append(
                [name for name, slot in slots if slot.state.alpha > 0 and float(slot.alpha) == 0.0]
            )
            return torch.arange(6.0) - 3.0 * sum(
                float(slot.alpha) for _, slot in slots if slot.seed is not None
            )

        tried = [name for name in garden.model.slots if stage_of(garden, name) == "PROBATIONARY"]
        garden.step(evaluate)
        steps.append((tried, calls))
    return steps


def test_evaluate_is_called_again_with_a_slot_off_exactly_for_seeds_on_probation():
    garden = grow_cnn(
        {1: PLANT_FIRST, 2: PLANT_SECOND, 6: CULL_FIRST}, lengths=StageLengths(ramp=2), keeps=False
    )
    steps = offs(garden)
    assert all(calls == [[], *([name] for name in tried)] for tried, calls in steps)
    assert {tuple(tried) for tried, _ in steps} >= {(), ("r0c0",), ("r0c0", "r0c1"), ("r0c1",)}


def test_a_contribution_is_the_loss_without_the_slot_minus_with_it():
    garden = walk_to(grow_cnn({0: PLANT_FIRST}), "PROBATIONARY")
    seed_on = garden.model.slot("r0c0")
    garden.step(
        lambda: (
            torch.tensor([1.0, 2.0, 3.0]) + (1 - float(seed_on.alpha)) * torch.tensor([1.0, 2, 3])
        )
    )
    found = of(SeedMeasured, garden.history)[-1]
    assert (found.slot, found.contribution) == ("r0c0", 2.0)
    assert found.standard_error == pytest.approx(1 / 3**0.5)


@pytest.mark.parametrize(
    ("higher_is_better", "as_bool", "sign"),
    [(None, True, 1), (True, False, 1), (False, True, -1), (False, False, -1)],
)
def test_bools_are_scores_numbers_are_losses_unless_the_user_says_otherwise(
    higher_is_better, as_bool, sign
):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, higher_is_better=higher_is_better), "PROBATIONARY")
    slot = garden.model.slot("r0c0")

    def evaluate():  # all right with the seed, three of four right without it
        values = torch.tensor([True, True, True, bool(slot.alpha > 0)])
        return values if as_bool else values.float()

    garden.step(evaluate)
    assert of(SeedMeasured, garden.history)[-1].contribution == sign * 0.25
    measured = of(HostEpoch, garden.history)[-1]
    assert (measured.held_out_score, measured.held_out_loss) == (
        (1.0, None) if sign > 0 else (None, 1.0)
    )


def test_a_seed_that_hurts_is_kept_all_the_same():
    garden = walk_to(grow_cnn({0: PLANT_FIRST}), "PROBATIONARY")
    walk_to(garden, "FOSSILIZED", evaluate=made_up(garden, helps=-1.0))
    assert garden.model.fossilized_seeds == 1


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2.5, 1200])
def test_a_float_budget_is_a_multiple_and_an_int_a_number(budget):
    garden = grow_cnn(budget=budget)
    assert garden.model.budget == (int(2.5 * count_parameters(CNN())) if budget == 2.5 else 1200)


@pytest.mark.parametrize("budget", [1.0, 0.5, float("nan"), float("inf"), True, "2"])
def test_a_budget_without_meaning_is_refused(budget):
    with pytest.raises(SettingError, match="budget"):
        grow_cnn(budget=budget)


def test_a_budget_too_small_for_any_seed_names_the_least_that_would_do():
    own = count_parameters(CNN())
    with pytest.raises(SettingError, match=rf" 1 .*{own}.* {own + 12}"):
        grow_cnn(budget=own + 1)


def test_a_sham_is_no_seed_that_a_budget_has_room_for():
    host = CNN()
    size = count_parameters(host)
    times = math.ceil(100 * (size + 12) / size) / 100
    with pytest.raises(SettingError, match=rf"smallest seed \(norm in .* \({times:g} times"):
        grow_cnn(host=host, budget=size + 1, blueprints=["sham", "norm"])


@pytest.mark.parametrize(
    ("budget", "largest"), [(1.5, "mlp_tiny"), (2.6, "mlp_small"), (7.0, "mlp")]
)
def test_a_tabular_network_has_seeds_of_a_size_that_its_budget_takes(budget, largest):
    host = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    garden = esper.grow(host, slots="3", example=torch.zeros(4, 20), budget=budget)
    model = garden.model
    room = model.budget - model.host_params
    prices = {name: price for (_, name, blend), price in model.costs.items() if blend == "linear"}
    assert set(prices) == {"lora", "mlp_tiny", "mlp_small", "mlp"}
    assert max((price, name) for name, price in prices.items() if price <= room)[1] == largest


def test_a_refused_budget_leaves_no_hook_on_the_model():
    host = CNN()
    with pytest.raises(SettingError):
        grow_cnn(host=host, budget=count_parameters(host) + 1)
    assert not any(module._forward_hooks for module in host.modules())


def test_without_limits_there_is_one_seed_per_slot():
    assert grow_cnn().model.max_seeds == 2
    assert grow_cnn(budget=3.0).model.max_seeds is None
    assert grow_cnn(max_seeds=5).model.max_seeds == 5


# -- policies --------------------------------------------------------------------------------------


def test_an_illegal_action_of_a_foreign_policy_is_refused_recorded_and_counts_as_waiting():
    garden = grow_cnn({0: CULL_FIRST, 1: PLANT_FIRST})
    refused = of(ActionRefused, garden.step(made_up(garden)))
    assert [(e.op, e.slot) for e in refused] == [("CULL", "r0c0")]
    assert "r0c0 is DORMANT" in refused[0].reason
    assert of(ActionTaken, garden.step(made_up(garden))) == [
        ActionTaken(0, 2, "GERMINATE", "r0c0", "conv_light", "linear", module="layer1")
    ]


def test_a_jointly_impossible_action_of_a_foreign_policy_changes_nothing():
    garden = grow_cnn({0: PLANT_FIRST, 1: PLANT_FIRST})
    garden.step(made_up(garden))
    before = garden.model.births
    (refused,) = of(ActionRefused, garden.step(made_up(garden)))
    assert garden.model.births == before
    assert "DORMANT" in refused.reason


def test_a_policy_gets_back_what_it_remembered():
    garden = grow_cnn({2: PLANT_FIRST})
    for _ in range(3):
        garden.step(made_up(garden))
    assert garden.memory == 3
    assert [e.epoch for e in of(ActionTaken, garden.history)] == [3]


def test_an_unknown_policy_name_shows_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'heuristik'.*'heuristic'"):
        grow_cnn(policy="heuristik")


def test_naming_the_sham_policy_brings_its_blueprint_along():
    garden = grow_cnn(policy="sham")
    for _ in range(8):
        garden.step(made_up(garden))
    assert {e.blueprint for e in of(ActionTaken, garden.history) if e.op == "GERMINATE"} == {"sham"}
    assert garden.model.total_params == count_parameters(CNN())


# -- hints, ownership, summary ---------------------------------------------------------------------


def hints(lr_now):
    garden = grow_cnn({0: PLANT_FIRST}, attach=False)
    optimizer = torch.optim.SGD(garden.parameters(), lr=1.0)
    garden.attach(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = lr_now
    return of(GrowthHint, garden.step(made_up(garden)))


def test_planting_at_a_low_rate_gives_one_hint():
    (hint,) = hints(0.05)
    assert "seed_lr" in hint.text


def test_planting_at_a_high_rate_gives_no_hint():
    assert hints(0.5) == []


def test_a_seed_that_no_optimizer_owns_is_an_error_at_the_next_step():
    garden = grow_cnn({1: PLANT_FIRST}, attach=False)
    with pytest.raises(OptimizerError, match=r"attach\(optimizer\)"):
        garden.step(made_up(garden))
    assert garden.model.active_seeds == 0
    garden.model.germinate_seed("r0c0", "conv_light")
    with pytest.raises(OptimizerError, match=r"conv_light .*r0c0.*attach\(optimizer\)"):
        garden.model.tick()


def test_zeros_and_ones_as_numbers_are_refused_until_the_user_says_what_they_are():
    garden = grow_cnn()
    with pytest.raises(MeasurementError, match="higher_is_better=True"):
        garden.step(lambda: torch.tensor([1.0, 0.0, 1.0]))
    assert garden.epoch == 0


def test_a_model_that_is_growing_cannot_be_grown_again():
    garden = grow_cnn()
    for model in (garden.model, garden.model.host):
        with pytest.raises(esper.EsperError, match="harvest"):
            esper.grow(model, slots="layer1", example=IMAGES)


def test_a_harvested_network_can_grow_again():
    first = walk_to(grow_cnn({0: PLANT_FIRST}), "DORMANT").harvest()
    again = esper.grow(first, slots=["layer1", "layer2"], example=IMAGES)
    assert torch.equal(again.harvest().eval()(IMAGES), first.eval()(IMAGES))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": 3}, "policy is 3"),
        ({"policy": lambda facts: None}, "decide"),
        ({"settings": {"epochs": 3}}, "dict.*GrowthSettings"),
        ({"budget": 2}, r"budget=2\.0"),
        ({"budget": "2x"}, "budget '2x'"),
    ],
)
def test_a_setting_of_the_wrong_form_is_refused_with_the_right_one(options, words):
    with pytest.raises(SettingError, match=words):
        esper.grow(CNN(), slots="layer1", example=IMAGES, **options)


def test_a_length_of_training_below_one_is_refused():
    with pytest.raises(SettingError, match=r"epochs .* 1"):
        esper.GrowthSettings(epochs=-1)


def test_values_instead_of_a_function_are_refused():
    with pytest.raises(MeasurementError, match="function evaluate"):
        grow_cnn().step(torch.ones(3))


def test_a_scheduler_made_before_attaching_has_to_be_passed():
    garden = grow_cnn(attach=False)
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(OptimizerError, match=r"attach\(optimizer, scheduler\)"):
        garden.attach(optimizer)
    assert len(optimizer.param_groups) == 1


def test_a_seed_that_was_taken_out_of_the_optimizer_is_an_error_at_the_next_step():
    garden = walk_to(grow_cnn({0: PLANT_FIRST}), "BLENDING")
    del garden.model.link.optimizer.param_groups[1]["params"][0]
    with pytest.raises(OptimizerError, match=r"1 parameters .*conv_light .*r0c0"):
        garden.step(made_up(garden))


def test_the_summary_shows_slots_stages_parameters_budget_and_evidence():
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, budget=3.0, keeps=False), "PROBATIONARY")
    assert "not measured" in garden.summary()
    garden.step(made_up(garden))
    text = garden.summary()
    for part in (
        "layer1",
        "PROBATIONARY",
        "conv_light",
        "1.00",
        f"of {garden.model.budget:,} parameters",
        "±",
    ):
        assert part in text
    assert "DORMANT" in text


def test_the_summary_shows_itself_when_it_is_printed():
    assert "layer1" in str(grow_cnn().summary())


def test_attributes_and_methods_fall_through_to_the_host():
    garden = grow_cnn()
    assert garden.model.motto == "small"
    assert garden.model.layer1 is garden.model.host.layer1
    with pytest.raises(AttributeError, match="height"):
        _ = garden.model.height


def test_settings_reach_the_lifecycle():
    garden = esper.grow(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),
        slots="0",
        example=torch.zeros(2, 6),
        policy=script({0: PLANT_FIRST}),
        settings=GrowthSettings(lengths=StageLengths(ramp=4)),
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.step(made_up(garden))
    assert garden.model.slot("r0c0").state.alpha == 0.25


def test_a_live_seeds_gradients_are_compared_with_the_hosts():
    """Against the gradients of the epoch's only step, with a fossil on the host's side."""
    garden = grow_cnn({0: PLANT_FIRST}, scale=0.5, max_seeds=2)
    model, optimizer = garden.model, garden.model.link.optimizer
    model.build_in("r0c1", "conv_light")
    garden.step(lambda: losses_of(model, HELD_OUT))
    optimizer.zero_grad()
    losses_of(model, IMAGES).mean().backward()
    seed = list(model.slot("r0c0").seed.parameters())
    host = [*model.host.parameters(), *model.slot("r0c1").fossils.parameters()]
    roots = [
        sum(float(p.grad.square().sum()) for p in own) / sum(p.numel() for p in own)
        for own in (seed, host)
    ]
    optimizer.step()
    garden.step(lambda: losses_of(model, HELD_OUT))
    ratio = model.get_slot_reports()["r0c0"].metrics.seed_gradient_norm_ratio
    assert ratio == pytest.approx((roots[0] / roots[1]) ** 0.5, rel=1e-4)


def test_a_step_builds_the_view_of_its_model_once(monkeypatch):
    built = []
    for name in ("view", "get_slot_reports"):
        real = getattr(MorphogeneticModel, name)
        monkeypatch.setattr(
            MorphogeneticModel,
            name,
            lambda self, name=name, real=real: built.append(name) or real(self),
        )
    garden = grow_cnn({0: PLANT_FIRST, 3: KEEP_FIRST}, lengths=StageLengths(ramp=1))
    stages = []
    for epoch in range(6):
        built.clear()
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
        assert built == ["view", "get_slot_reports"]
        stages.append(garden.model.slot("r0c0").state.stage.name)
    assert {"BLENDING", "PROBATIONARY", "FOSSILIZED"} <= set(stages)
