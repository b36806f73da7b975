"""Averaged weights:

they follow growth, steps and saves, and nobody takes them for the weights themselves.
"""

import pytest
import torch
from torch import optim

import esper
from esper.leyline.errors import SettingError
from user_models import (
    CNN,
    MLP,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    random_images,
    random_vectors,
    script,
    train_epoch,
)

IMAGES, HELD_OUT = random_images(64, seed=1), random_images(40, seed=2)


def play(garden, epochs=1):
    for _ in range(epochs):
        train_epoch(garden.model, garden.model.link.optimizer, garden.epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    return garden


def averaged_by_hand(garden, decay, epochs):
    """What an average of each parameter is that begins with the parameter itself."""
    found = {}

    def note(*_):
        for p in garden.parameters():
            found[p] = (
                found[p] * decay + p.detach() * (1 - decay) if p in found else p.detach().clone()
            )

    note()
    garden.model.link.optimizer.register_step_post_hook(note)
    play(garden, epochs)
    return {name: found[p] for name, p in garden.model.named_parameters()}


def test_an_average_follows_growth():
    garden = grow_cnn({0: PLANT_FIRST, 1: (1, 1, 2, 0), 5: (2, 0, 0, 0)}, scale=0.5)
    ema = garden.ema(0.9)
    expected = averaged_by_hand(garden, 0.9, 6)
    own = {name: p.detach().clone() for name, p in garden.model.named_parameters()}
    assert garden.model.fossilized_seeds
    with ema.applied():
        for name, p in garden.model.named_parameters():
            assert torch.allclose(p, expected[name], atol=1e-6), name
        assert not torch.equal(
            garden.model.slot("r0c0").fossils[0].scale, own["slots.r0c0.fossils.0.scale"]
        )
    assert all(torch.equal(p, own[name]) for name, p in garden.model.named_parameters())


def test_an_average_is_harvested():
    garden = grow_cnn({0: PLANT_FIRST}, scale=0.5)
    ema = garden.ema(0.9)
    play(garden, 5)
    with ema.applied(), torch.no_grad():
        plain, expected = garden.harvest().eval(), garden.model.eval()(HELD_OUT)
    assert torch.equal(plain(HELD_OUT), expected)
    assert not torch.equal(garden.harvest().eval()(HELD_OUT), expected)


def test_an_average_is_saved_and_goes_on(tmp_path):
    garden = grow_cnn({0: PLANT_FIRST}, scale=0.5)
    garden.ema(0.9)
    play(garden, 3)
    garden.save(tmp_path)
    again = esper.load(tmp_path, CNN(), policy=script({}))
    again.attach(optim.SGD(again.parameters(), lr=0.05, momentum=0.9))
    for each in (garden, again):
        play(each, 2)
    ours, theirs = garden.ema(0.9).tensors(), again.ema(0.9).tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(SettingError, match=r"0\.9.* 0\.99"):
        again.ema(0.99)


def test_the_average_of_a_newborn_begins_at_the_same_step_after_a_resume(tmp_path):
    garden = grow_cnn({1: PLANT_FIRST})
    garden.ema(0.9)
    play(garden, 2).save(tmp_path / "run")
    resumed = esper.load(tmp_path / "run", CNN(), policy=script({}))
    resumed.attach(type(garden.model.link.optimizer)(resumed.parameters(), lr=1e-2))
    assert not [name for name in resumed.average.tensors() if ".seed." in name], (
        "it has taken no step yet"
    )


def test_an_average_follows_a_model_that_is_converted():
    garden = grow_cnn()
    ema = garden.ema(0.9)
    garden.model.double()
    ema.update()
    assert {value.dtype for value in ema.tensors().values()} == {torch.float64}


def test_an_average_of_half_precision_moves():
    garden = esper.grow(
        MLP().bfloat16(), slots="middle", example=random_vectors(2).bfloat16(), policy="never"
    )
    garden.attach(optim.SGD(garden.parameters(), lr=0.1))
    weight = garden.model.host.enter.weight
    with torch.no_grad():
        weight.fill_(1.0)
        ema = garden.ema(0.999)
        weight.fill_(1.5)  # a step towards it is a tenth of what half precision can add to 1
    for _ in range(100):
        ema.update()
    assert (ema.tensors()["host.enter.weight"] > 1.04).all()


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_without_meaning_is_refused(decay):
    with pytest.raises(SettingError, match="decay"):
        grow_cnn().ema(decay)


def test_an_average_begins_with_the_weights_of_the_first_step():
    """Weights may be loaded, or made equal by DDP, after somebody asked for an average."""
    garden = grow_cnn()
    ema, weight = garden.ema(0.5), garden.model.host.head.weight
    with torch.no_grad():
        weight.fill_(3.0)
    losses_of(garden.model, IMAGES[:8]).mean().backward()
    garden.model.link.optimizer.step()
    assert torch.allclose(ema.tensors()["host.head.weight"], (3.0 + weight.detach()) / 2)


@pytest.mark.parametrize(
    ("order", "updates"), [((0, 1), [2]), ((1, 0), [2]), ((0, 0), [1]), ((0, 0, 1), [1, 3])]
)
def test_an_average_follows_each_of_several_optimisers(order, updates):
    """Once all have stepped; if one steps more often, before it does so again."""
    garden = esper.grow(MLP(), slots="middle", example=random_vectors(2), policy="never")
    first, *others = garden.parameters()
    optimizers = [optim.SGD([first], lr=0.1), optim.SGD(others, lr=0.1)]
    garden.attach(optimizers)
    ema, seen = garden.ema(0.5), [first.detach().clone()]
    for number in order:
        losses_of(garden.model, random_vectors(8)).mean().backward()
        optimizers[number].step()
        seen.append(first.detach().clone())
    expected = seen[0]
    for steps in updates:
        expected = (expected + seen[steps]) / 2
    found = dict(zip(garden.parameters(), ema.tensors().values(), strict=True))[first]
    assert torch.allclose(found, expected)


def train(garden, folder):
    losses_of(garden.model, IMAGES[:8]).mean().backward()
    garden.model.link.optimizer.step()


ACTS = {
    "train": train,
    "step": lambda garden, folder: garden.step(lambda: losses_of(garden.model, HELD_OUT)),
    "prune": lambda garden, folder: garden.prune(lambda: losses_of(garden.model, HELD_OUT)),
    "save": lambda garden, folder: garden.save(folder / "other"),
    "restore": lambda garden, folder: garden.restore(folder / "save"),
}


@pytest.mark.parametrize("act", ACTS)
def test_averaged_weights_are_not_taken_for_the_weights_themselves(tmp_path, act):
    garden = grow_cnn({0: PLANT_FIRST})
    ema = garden.ema(0.9)
    play(garden, 2).save(tmp_path / "save")
    with ema.applied():
        with ema.applied():
            garden.harvest()
        with pytest.raises(SettingError, match=r"ema\.applied"):
            ACTS[act](garden, tmp_path)
    ACTS[act](garden, tmp_path)
    assert not (tmp_path / "other").exists() or act == "save"
