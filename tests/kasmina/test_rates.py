"""Learning rates of seeds:

a multiple of the host's plan under every scheduler, warm-up, re-warming, low rates.
"""

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from esper.kasmina.optimiser import PER_GROUP_SCHEDULERS
from esper.leyline.errors import OptimizerError
from esper.leyline.rates import is_low
from kasmina.gardens import grow_mlp, loss_of, vectors

INPUTS = vectors()
SCHEDULERS = {
    schedulers.LambdaLR: lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    schedulers.MultiplicativeLR: lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    schedulers.StepLR: lambda o: schedulers.StepLR(o, 4, 0.3),
    schedulers.MultiStepLR: lambda o: schedulers.MultiStepLR(o, [3, 8], 0.3),
    schedulers.ConstantLR: lambda o: schedulers.ConstantLR(o, 0.4, total_iters=6),
    schedulers.LinearLR: lambda o: schedulers.LinearLR(o, 0.2, total_iters=9),
    schedulers.ExponentialLR: lambda o: schedulers.ExponentialLR(o, 0.8),
    schedulers.PolynomialLR: lambda o: schedulers.PolynomialLR(o, total_iters=20, power=2.0),
    schedulers.CosineAnnealingLR: lambda o: schedulers.CosineAnnealingLR(o, T_max=20),
    schedulers.CosineAnnealingWarmRestarts: lambda o: schedulers.CosineAnnealingWarmRestarts(
        o, T_0=5
    ),
    schedulers.OneCycleLR: lambda o: schedulers.OneCycleLR(o, max_lr=0.4, total_steps=30),
}
every_scheduler = pytest.mark.parametrize(
    "build", SCHEDULERS.values(), ids=[cls.__name__ for cls in SCHEDULERS]
)


def seed_rate(model):
    return model.link.optimizer.param_groups[model.link.groups["r0c0"][model.link.home]]["lr"]


def host_rate(model):
    return model.link.optimizer.param_groups[0]["lr"]


def step(model, scheduler=None):
    model.link.optimizer.zero_grad()
    loss_of(model, INPUTS).backward()
    model.link.optimizer.step()
    if scheduler is not None:
        scheduler.step()


def attach(build=None, *, before=0, lr=0.2, **options):
    """A model with its optimiser and scheduler attached after `before` steps of training without
    slots.
    """
    model = grow_mlp(attach=False)
    optimizer = optim.SGD(model.host.parameters(), lr=lr, momentum=0.9)
    scheduler = None if build is None else build(optimizer)
    for _ in range(before):
        loss_of(model, INPUTS).backward()
        optimizer.step()
        scheduler.step()
    model.attach(optimizer, scheduler=scheduler, **options)
    return model, scheduler


def watch(model):
    """Rates of (host, seed) as the optimiser uses them, step by step."""
    used = []
    model.link.optimizer.register_step_pre_hook(
        lambda *_: used.append((host_rate(model), seed_rate(model)))
    )
    return used


def test_every_supported_scheduler_is_tested():
    assert ", ".join(cls.__name__ for cls in SCHEDULERS) == PER_GROUP_SCHEDULERS


@every_scheduler
@pytest.mark.parametrize("before", [0, 5], ids=["from the start", "mid-schedule"])
def test_a_seeds_rate_is_a_multiple_of_the_hosts_at_every_step(build, before):
    model, scheduler = attach(build, before=before, seed_lr=0.5)
    used = watch(model)
    for index in range(12):
        if index == 2:
            model.germinate_seed("r0c0", "lora")
            model.tick()
        step(model, scheduler)
    assert all(seed == pytest.approx(0.5 * host, rel=1e-9) for host, seed in used[2:])
    assert len({host for host, _ in used}) > 1


@every_scheduler
def test_the_hosts_own_plan_does_not_change_by_attaching(build):
    alone = optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.2, momentum=0.9)
    plan = build(alone)
    model, scheduler = attach(build, seed_lr=3.0)
    for _ in range(12):
        assert host_rate(model) == alone.param_groups[0]["lr"]
        alone.step()
        plan.step()
        step(model, scheduler)


@every_scheduler
def test_the_last_rates_of_a_scheduler_cover_every_group(build):
    model, scheduler = attach(build, seed_lr=0.5)
    step(model, scheduler)
    assert scheduler.get_last_lr() == [group["lr"] for group in model.link.optimizer.param_groups]


@pytest.mark.parametrize(
    "build",
    [
        lambda o: schedulers.CosineAnnealingLR(o, T_max=20, eta_min=0.05),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5, eta_min=0.05),
    ],
    ids=["cosine", "warm restarts"],
)
def test_a_floor_of_the_plan_is_multiplied_too(build):
    model, scheduler = attach(build, seed_lr=0.5)
    used = watch(model)
    model.germinate_seed("r0c0", "lora")
    for _ in range(4):
        step(model, scheduler)
    assert all(seed == pytest.approx(0.5 * host, rel=1e-9) for host, seed in used)


def test_a_scheduler_made_after_attaching_needs_nothing():
    model, _ = attach(seed_lr=0.5)
    scheduler = schedulers.CosineAnnealingLR(model.link.optimizer, T_max=20)
    used = watch(model)
    model.germinate_seed("r0c0", "lora")
    for _ in range(6):
        step(model, scheduler)
    assert all(seed == pytest.approx(0.5 * host) for host, seed in used)


@pytest.mark.parametrize(
    "build",
    [
        lambda o: schedulers.ReduceLROnPlateau(o),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.ConstantLR(o), schedulers.StepLR(o, 2)], [3]
        ),
    ],
    ids=["ReduceLROnPlateau", "CyclicLR", "SequentialLR"],
)
def test_another_scheduler_is_refused_by_name_and_nothing_is_attached(build):
    model = grow_mlp(attach=False)
    optimizer = optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9)
    scheduler = build(optimizer)
    with pytest.raises(OptimizerError, match=f"{type(scheduler).__name__} .*StepLR"):
        model.attach(optimizer, scheduler=scheduler)
    assert len(optimizer.param_groups) == 1
    assert model.link is None


def test_a_scheduler_of_another_optimiser_is_refused():
    model = grow_mlp(attach=False)
    other = optim.SGD(model.host.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match=r"scheduler .*optimiser"):
        model.attach(
            optim.SGD(model.host.parameters(), lr=0.1), scheduler=schedulers.StepLR(other, 2)
        )


# -- low rates -------------------------------------------------------------------------------------


def decayed():
    """A model that trained at rate 0.2 and is at 0.02 now."""
    model, _ = attach()
    step(model)
    for group in model.link.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.1
    return model


def test_planting_leaves_a_low_rate_alone():
    model = decayed()
    used = watch(model)
    model.germinate_seed("r0c0", "lora")
    step(model)
    assert used[0] == pytest.approx((0.02, 0.02))


def test_a_decayed_rate_counts_as_low():
    model, _ = attach()
    step(model)
    assert not model.link.is_rate_low
    for factor, expected in ((0.11, False), (0.09, True)):
        model.link.optimizer.param_groups[0]["lr"] = 0.2 * factor
        assert model.link.is_rate_low == expected


def test_a_rate_that_was_decayed_before_attaching_counts_as_low():
    model, _ = attach(lambda o: schedulers.ExponentialLR(o, 0.5), before=6)
    assert host_rate(model) < 0.1 * 0.2
    assert model.link.is_rate_low


@pytest.mark.parametrize("peak", [1e-3, 2e-4, 3e-4, 6e-4, 7e-5])
def test_a_tenth_of_the_peak_is_low_whatever_floating_point_says(peak):
    assert is_low(peak / 10, peak)
    assert is_low(float(f"{peak / 10:.3g}"), peak)
    assert not is_low(peak / 9.9, peak)
