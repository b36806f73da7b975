"""A garden in few words: modules by name, one line per change, limits on FLOPs, its summary."""

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import BudgetExceededError, SettingError, UnknownNameError
from esper.telemetry.events import ActionTaken, GateJudged, HostEpoch

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))


def grow(**options):
    """A garden with an optimiser, and how to train and step it once."""
    how = {"slots": "1", "example": IMAGES, "policy": "never", **options}
    garden = esper.grow(network(), **how)
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.05)
    garden.attach(optimizer)

    def losses():
        return garden.model(IMAGES).pow(2).mean(1)

    def step():
        optimizer.zero_grad()
        losses().mean().backward()
        optimizer.step()
        return garden.step(losses)

    return garden, step


def test_a_seed_is_planted_kept_and_culled_by_the_name_of_its_module():
    garden, step = grow(max_seeds=2)
    garden.plant("1", "conv_light")
    step()
    step()
    garden.keep("1")
    assert garden.model.fossilized_seeds == 1
    step()
    step()
    garden.plant("1", "conv_light")
    step()
    garden.cull("r0c0")
    assert (garden.model.active_seeds, garden.model.fossilized_seeds) == (0, 1)
    with pytest.raises(UnknownNameError, match="slot or module"):
        garden.plant("layer9", "conv_light")


def test_a_garden_shows_its_summary():
    garden, step = grow()
    step()
    assert repr(garden) == garden.summary()
    assert "DORMANT" in repr(garden)


def test_a_step_returns_one_event_for_each_change_and_with_verbose_all():
    short, step = grow(policy="schedule:epochs=0")
    long, long_step = grow(policy="schedule:epochs=0", verbose=True)
    returned = []
    all_returned = []
    for _ in range(4):
        returned += step()
        all_returned += long_step()
    assert [event.op for event in returned if isinstance(event, ActionTaken)] == [
        "GERMINATE",
        "FOSSILIZE",
    ]
    assert len(returned) == 2
    assert all_returned == long.history == short.history
    assert {HostEpoch, GateJudged} <= {type(event) for event in all_returned}


def test_the_line_of_a_seed_that_is_kept_names_the_seed():
    _, step = grow(policy="schedule:epochs=0", blueprints=["conv_light"])
    lines = [str(event) for _ in range(3) for event in step()]
    assert lines[-1] == "epoch 3: FOSSILIZE conv_light in r0c0 (1)"


# -- a limit on FLOPs ------------------------------------------------------------------------------


def price_of(garden, name):
    return garden.model.slot("r0c0").prices[name, False].flops


def test_a_budget_of_flops_lets_through_what_fits_and_nothing_dearer():
    free, _ = grow(blueprints=["conv_small", "conv_heavy"])
    cheap = price_of(free, "conv_small")
    assert cheap < price_of(free, "conv_heavy")
    garden, _ = grow(blueprints=["conv_small", "conv_heavy"], budget_flops=free.flops + cheap)
    with pytest.raises(BudgetExceededError, match="raise budget_flops"):
        garden.plant("1", "conv_heavy")
    garden.plant("1", "conv_small")
    view = garden.model.view().flops
    assert (view.used, view.budget) == (free.flops + cheap, free.flops + cheap)


def test_a_rule_under_a_budget_of_flops_never_grows_beyond_it():
    free, _ = grow(blueprints=["conv_small", "conv_heavy"])
    limit = free.flops + 2 * price_of(free, "conv_small")
    garden, step = grow(
        blueprints=["conv_small", "conv_heavy"], policy="heuristic", budget_flops=limit
    )
    for _ in range(9):
        step()
    assert garden.model.fossilized_seeds == 2
    assert garden.books.network_flops(garden.model) == limit


def test_a_budget_of_flops_without_room_is_refused_at_once():
    with pytest.raises(SettingError, match="leaves no room to grow"):
        grow(budget_flops=1.0)
    with pytest.raises(SettingError, match="the cheapest seed"):
        grow(budget_flops=1.0001, blueprints=["conv_heavy"])
    with pytest.raises(SettingError, match="leaves no room to grow"):
        grow(budget_flops=True)


def test_a_budget_of_flops_is_saved(tmp_path):
    garden, _ = grow(budget_flops=3.0)
    loaded = esper.load(garden.save(tmp_path / "saved"), network())
    assert loaded.model.flops_limit == garden.model.flops_limit
    assert loaded.model.view().flops == garden.model.view().flops
