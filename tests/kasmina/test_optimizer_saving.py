"""What optimisers remember comes back to the bit, or is refused when it is saved."""

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import SaveError
from user_models import CNN, PLANT_FIRST, grow_cnn, random_images, script, train_epoch

IMAGES = random_images(16)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(build=sgd):
    garden = grow_cnn({0: PLANT_FIRST}, attach=False)
    optimizer = build(garden.parameters())
    garden.attach(optimizer)
    train_epoch(garden.model, optimizer, 0, IMAGES)
    return garden, optimizer


def first_state(optimizer):
    return next(iter(optimizer.state.values()))


UNSAVABLE = {
    "an entry of no parameter": (
        lambda optimizer: optimizer.state.__setitem__("count", 3),
        r"state\['count'\], which is of no parameter",
    ),
    "a tuple": (
        lambda optimizer: first_state(optimizer).update(pair=(1, 2)),
        r"state 'pair' of host\.layer1\.0\.weight, a tuple",
    ),
    "a number as key": (lambda optimizer: first_state(optimizer).update({0: 1.0}), "state 0 of"),
    "a key with a bar": (
        lambda optimizer: first_state(optimizer).update({"a|b": torch.ones(2)}),
        r"state 'a\|b' of",
    ),
    "tensors in a dict": (
        lambda optimizer: first_state(optimizer).update(inner={"x": torch.ones(2)}),
        "state 'inner' of .*, a dict",
    ),
    "a sparse tensor": (
        lambda optimizer: first_state(optimizer).update(thin=torch.eye(3).to_sparse()),
        "state 'thin' of .*, a Tensor",
    ),
    "an infinite number": (
        lambda optimizer: first_state(optimizer).update(best=float("inf")),
        "state 'best' of .*, a float",
    ),
    "an option of several numbers": (
        lambda optimizer: optimizer.param_groups[0].update(weights=torch.ones(2)),
        "option 'weights', a Tensor",
    ),
    "an option of several tensors": (
        lambda optimizer: optimizer.param_groups[0].update(
            betas=(torch.tensor(0.9), torch.tensor(0.99))
        ),
        "option 'betas', a tuple",
    ),
    "an option with numbers as keys": (
        lambda optimizer: optimizer.param_groups[0].update(table={1: 2}),
        "option 'table', a dict",
    ),
    "a function": (
        lambda optimizer: optimizer.param_groups[0].update(adjust=abs),
        "option 'adjust', a builtin",
    ),
}


@pytest.mark.parametrize(("change", "match"), UNSAVABLE.values(), ids=UNSAVABLE.keys())
def test_what_would_come_back_as_something_else_is_refused_when_it_is_saved(
    change, match, tmp_path
):
    garden, optimizer = trained()
    garden.save(tmp_path)
    change(optimizer)
    with pytest.raises(SaveError, match=f"^SGD has (the )?{match}.*would not come back") as caught:
        garden.save(tmp_path)
    assert "\n" not in str(caught.value)
    garden.restore(tmp_path)  # the save from before is whole, and brings the optimiser back


def test_lists_and_tuples_and_single_numbers_come_back_as_they_were(tmp_path):
    garden, optimizer = trained()
    options = {"lr": torch.tensor(0.05), "betas": (0.9, 0.99), "steps": [1, 2], "count": 3}
    optimizer.param_groups[0].update(options, least=np.float32(0.1))
    first_state(optimizer).update(seen=[1, {"x": None}], mean=torch.tensor(0.3))
    garden.save(tmp_path)
    loaded = esper.load(tmp_path, CNN(), policy=script({}))
    again = sgd(loaded.parameters())
    loaded.attach(again)
    group = again.param_groups[0]
    assert {name: group[name] for name in options} == options
    assert type(group["betas"]) is tuple
    assert type(group["steps"]) is list
    assert group["least"] == np.float32(0.1)
    assert first_state(again)["seen"] == [1, {"x": None}]
    assert first_state(again)["mean"] == torch.tensor(0.3)


def test_a_group_that_is_added_after_attach_is_refused_when_it_is_saved(tmp_path):
    garden, optimizer = trained()
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(
        SaveError, match=r"SGD has 4 parameter groups, .* it had 3, .*before you attach"
    ):
        garden.save(tmp_path)


def test_two_gardens_on_one_optimiser_are_refused_when_they_are_saved(tmp_path):
    gardens = [grow_cnn(attach=False), grow_cnn(attach=False)]
    optimizer = sgd([parameter for garden in gardens for parameter in garden.parameters()])
    for garden in gardens:
        garden.attach(optimizer)
    for garden in gardens:  # the one that was attached last, too
        with pytest.raises(SaveError, match=r"another garden follows it.*an optimiser of its own"):
            garden.save(tmp_path)


def test_a_garden_is_saved_after_another_optimiser_took_the_place_of_its_first(tmp_path):
    garden, _ = trained()
    garden.attach(sgd(garden.parameters()))
    garden.save(tmp_path)


def test_a_group_that_is_gone_since_attach_is_refused_when_it_is_saved(tmp_path):
    garden, optimizer = trained()
    del optimizer.param_groups[-1]
    with pytest.raises(SaveError, match=r"^SGD has 2 parameter groups, .* it had 3"):
        garden.save(tmp_path)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["one", "row"])
def test_an_option_that_became_a_tensor_later_comes_back_as_that_tensor(shape, tmp_path):
    garden, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.full(shape, 0.01)
    garden.save(tmp_path)
    loaded = esper.load(tmp_path, CNN(), policy=script({}))
    again = sgd(loaded.parameters())
    loaded.attach(again)
    rate = again.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert (rate.shape, rate.dtype) == (shape, torch.float32)
    assert torch.equal(rate, torch.full(shape, 0.01))


def test_state_without_data_is_refused_when_it_is_saved(tmp_path):
    garden, optimizer = trained()
    first_state(optimizer)["mean"] = torch.zeros(2, device="meta")
    with pytest.raises(SaveError, match=r"state 'mean' of .*, a Tensor: it would not come back"):
        garden.save(tmp_path)
