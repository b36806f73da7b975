"""Parameters enter and leave an optimiser while the state of all others stays as it is, to the
bit.
"""

import pytest
import torch
from torch import optim

from esper.leyline.errors import OptimizerError, SettingError
from kasmina.gardens import grow_mlp, keep, loss_of, measure, vectors

INPUTS = vectors()
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "SGD nesterov foreach": lambda p: optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.3),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "Adam with a tensor rate": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}
every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def grown(build, **options):
    model = grow_mlp(attach=False)
    model.attach(build(model.host.parameters()), **options)
    return model


def step(model, times=2):
    for _ in range(times):
        model.link.optimizer.zero_grad()
        loss_of(model, INPUTS).backward()
        model.link.optimizer.step()


def state_of(model, parameters):
    """A copy of what the optimiser holds for these parameters."""
    state = model.link.optimizer.state
    return [
        {
            key: value.clone() if torch.is_tensor(value) else value
            for key, value in state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]


def is_same_state(first, second):
    return all(
        a.keys() == b.keys()
        and all(
            torch.equal(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key]
            for key in a
        )
        for a, b in zip(first, second, strict=True)
    )


def planted(build):
    """A trained model with a trained seed on probation in each slot."""
    model = grown(build)
    step(model)
    for slot_id in ("r0c0", "r0c1"):
        model.germinate_seed(slot_id, "lora")
    model.tick()
    step(model, 3)
    model.tick()
    return model


def group_of(model, slot_id):
    return model.link.optimizer.param_groups[model.link.groups[slot_id][model.link.home]]


def parameters_in(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- state -----------------------------------------------------------------------------------------


@every_optimizer
def test_germinating_keeps_the_state_of_all_others(build):
    model = grown(build)
    step(model)
    before = state_of(model, model.host.parameters())
    model.germinate_seed("r0c0", "mlp", "gated")
    assert is_same_state(before, state_of(model, model.host.parameters()))


@every_optimizer
def test_culling_keeps_the_state_of_all_others(build):
    model = planted(build)
    others = [*model.host.parameters(), *model.slot("r0c1").seed.parameters()]
    before = state_of(model, others)
    gone = list(model.slot("r0c0").seed.parameters())
    model.cull_seed("r0c0")
    assert is_same_state(before, state_of(model, others))
    assert not any(parameter in model.link.optimizer.state for parameter in gone)


@every_optimizer
def test_fossilizing_keeps_the_state_of_all_and_of_the_fossil(build):
    model = planted(build)
    measure(model, "r0c0")
    everything = list(model.parameters())
    before = state_of(model, everything)
    model.fossilize_seed("r0c0")
    assert is_same_state(before, state_of(model, everything))


@every_optimizer
def test_every_parameter_has_exactly_one_group_through_a_whole_episode(build):
    model = planted(build)
    measure(model, "r0c0")
    model.cull_seed("r0c1")
    keep(model, "r0c0")
    model.germinate_seed("r0c0", "mlp")
    owned = sorted(id(parameter) for parameter in parameters_in(model.link.optimizer))
    assert owned == sorted(id(parameter) for parameter in model.parameters())


@every_optimizer
def test_a_seed_learns_and_training_goes_on_after_each_operation(build):
    model = planted(build)
    measure(model, "r0c0")
    model.fossilize_seed("r0c0")
    model.cull_seed("r0c1")
    model.tick()
    before = [parameter.clone() for parameter in model.parameters()]
    step(model)
    assert all(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def test_an_empty_slot_does_not_change_how_the_host_trains():
    alone, wrapped = grow_mlp(attach=False).host, grow_mlp(attach=False)
    wrapped.host.load_state_dict(alone.state_dict())
    optimizer = OPTIMIZERS["AdamW"](alone.parameters())
    wrapped.attach(OPTIMIZERS["AdamW"](wrapped.host.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(alone, INPUTS).backward()
        optimizer.step()
    step(wrapped, 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(alone.parameters(), wrapped.host.parameters(), strict=True)
    )


def test_a_seed_gets_the_options_of_the_hosts_largest_group():
    model = grow_mlp(attach=False)
    large, small = model.host.blocks, model.host.head
    groups = [
        {"params": small.parameters(), "weight_decay": 0.3},
        {"params": large.parameters(), "weight_decay": 0.1},
    ]
    model.attach(optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)))
    assert (group_of(model, "r0c0")["weight_decay"], group_of(model, "r0c0")["betas"]) == (
        0.1,
        (0.8, 0.9),
    )


def test_fossils_from_before_belong_to_the_host_of_a_new_optimiser():
    model = planted(OPTIMIZERS["Adam"])
    measure(model, "r0c0")
    model.fossilize_seed("r0c0")
    model.attach(OPTIMIZERS["Adagrad"](model.host.parameters()))
    fossil = {id(parameter) for parameter in model.slot("r0c0").fossils.parameters()}
    assert fossil <= {id(parameter) for parameter in model.link.optimizer.param_groups[0]["params"]}
    step(model)


def test_attaching_the_same_optimiser_twice_is_refused():
    model = planted(OPTIMIZERS["Adam"])
    groups = len(model.link.optimizer.param_groups)
    with pytest.raises(OptimizerError, match="attached"):
        model.attach(model.link.optimizer)
    assert len(model.link.optimizer.param_groups) == groups


def test_a_detached_optimiser_no_longer_follows():
    model = grown(OPTIMIZERS["SGD"], seed_lr=5.0)
    first = model.link.optimizer
    model.attach(optim.SGD(model.host.parameters(), lr=0.1))
    model.germinate_seed("r0c0", "lora")
    assert not {id(p) for p in model.slot("r0c0").seed.parameters()} & {
        id(p) for p in parameters_in(first)
    }


# -- refusals --------------------------------------------------------------------------------------


def test_lbfgs_is_refused_by_name():
    model = grow_mlp(attach=False)
    with pytest.raises(OptimizerError, match=r"LBFGS .*SGD, Adam, AdamW"):
        model.attach(optim.LBFGS(model.host.parameters()))


def test_what_is_no_optimiser_is_refused():
    with pytest.raises(OptimizerError, match=r"dict .*SGD"):
        grow_mlp(attach=False).attach({})


def test_an_optimiser_without_all_of_the_host_is_refused_and_left_alone():
    model = grow_mlp(attach=False)
    optimizer = optim.SGD(model.host.head.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match=r"4 .*\(blocks.0.0.weight"):
        model.attach(optimizer)
    assert len(optimizer.param_groups) == 1
    assert model.link is None
    assert not optimizer._optimizer_step_pre_hooks


def test_a_frozen_part_of_the_host_need_not_be_in_the_optimiser():
    model = grow_mlp(attach=False)
    model.host.blocks.requires_grad_(False)
    model.attach(optim.SGD(model.host.head.parameters(), lr=0.1))
    model.germinate_seed("r0c0", "lora")
    model.tick()
    step(model)


@pytest.mark.parametrize("wrong", [{"seed_lr": 0.0}, {"seed_lr": -1.0}, {"seed_lr": float("nan")}])
def test_an_impossible_rate_setting_is_refused_by_name(wrong):
    model = grow_mlp(attach=False)
    optimizer = optim.SGD(model.host.parameters(), lr=0.1)
    with pytest.raises(SettingError, match=next(iter(wrong))):
        model.attach(optimizer, **wrong)
    assert len(optimizer.param_groups) == 1


def test_a_wrapped_model_needs_no_optimiser_to_run():
    assert grow_mlp(attach=False)(INPUTS).shape == (8, 3)
