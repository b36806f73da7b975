"""What a garden is, in plain data:

it has one order in every process, and processes and saves that differ in it are refused.
"""

import re

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import REGISTRY
from esper.leyline.errors import SaveError, SettingError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.runtime.config import TaskConfig
from garden.test_processes import in_group, refusal, values_of
from user_models import MLP, grow_cnn, losses_of, random_vectors

NAMES = {"norm", "conv_small", "conv_light", "depthwise"}
VECTORS = random_vectors()


# -- sets have no order ----------------------------------------------------------------------------


def test_the_names_of_a_set_are_sorted():
    garden = grow_cnn(blueprints=NAMES)
    assert garden.model.space.blueprint_ids[1:] == tuple(sorted(NAMES))
    settings = GrowthSettings(blends=frozenset({"sigmoid", "linear", "gated"}))
    assert settings.blends == ("gated", "linear", "sigmoid")
    config = TaskConfig.of({"blueprints": NAMES, "blends": {"sigmoid", "gated"}})
    assert config.blueprints == tuple(sorted(NAMES))
    assert config.blends == ("gated", "sigmoid")


def test_the_names_of_a_list_keep_their_order():
    assert grow_cnn(blueprints=["norm", "conv_light"]).model.space.blueprint_ids[1:] == (
        "norm",
        "conv_light",
    )


# -- processes -------------------------------------------------------------------------------------


def grow_mlp(**options):
    options = {"slots": "enter", "example": VECTORS, "blueprints": ["mlp", "lora"], **options}
    return esper.grow(options.pop("host", None) or MLP(), **options)


OTHERS = {
    "lengths": (
        lambda rank: {"settings": GrowthSettings(lengths=StageLengths(ramp=1 + rank))},
        r"settings\.lengths\.ramp is 2 on rank 1 and 1 on rank 0",
    ),
    "least_gain": (
        lambda rank: {"settings": GrowthSettings(least_gain=0.5 * rank)},
        r"settings\.least_gain is 0\.5 on rank 1 and 0\.0 on rank 0",
    ),
    "blends": (
        lambda rank: {"settings": GrowthSettings(blends=("linear", "gated")[:: 1 - 2 * rank])},
        r"settings\.blends is \['gated', 'linear'\] on rank 1 and \['linear', 'gated'\]",
    ),
    "higher_is_better": (
        lambda rank: {"higher_is_better": [None, True][rank]},
        "higher_is_better is True on rank 1 and None on rank 0",
    ),
    "blueprints": (
        lambda rank: {"blueprints": ["mlp", "lora"][:: 1 - 2 * rank]},
        r"blueprints is \['lora', 'mlp'\] on rank 1 and \['mlp', 'lora'\] on rank 0",
    ),
    "slots": (
        lambda rank: {"slots": ["enter", "middle"][rank]},
        r"slots\.r0c0 is middle on rank 1 and enter on rank 0",
    ),
    "budget": (lambda rank: {"budget": 2.0 + rank}, r"budget is \d+ on rank 1 and \d+ on rank 0"),
    "policy": (
        lambda rank: {"policy": ["never", "heuristic"][rank]},
        "policy is heuristic on rank 1 and never on rank 0",
    ),
    "host": (
        lambda rank: {"host": nn.Sequential(nn.Linear(6, 4 + rank)), "slots": "0"},
        r"host\.0\.weight is \[\[5, 6\], .*\] on rank 1 and \[\[4, 6\]",
    ),
}


@pytest.mark.ranks
def test_processes_that_grow_differently_are_refused_by_what_differs(tmp_path):
    def live(rank):
        told = {}
        for name, (options, _) in OTHERS.items():
            told[name] = refusal(lambda options=options: grow_mlp(**options(rank)))
        host = MLP()
        failed = refusal(lambda: grow_mlp(host=host, blueprints=["mlp"] if rank else ["unknown"]))
        garden = grow_mlp(host=host, blueprints=NAMES if rank > 1 else {"lora", "mlp"})
        return told, failed, garden.model.space.blueprint_ids

    for rank, (told, failed, names) in enumerate(values_of(tmp_path, in_group(live))):
        for name, (_, match) in OTHERS.items():
            assert told[name] is not None, name
            kind, text = told[name]
            assert kind is SettingError
            assert re.search(match + ".*the same arguments on every rank", text), text
        assert failed[0].__name__ == ("MeasurementError" if rank else "UnknownNameError")
        assert names == (None, "lora", "mlp")


@pytest.mark.ranks
def test_processes_that_load_different_saves_are_refused(tmp_path):
    def live(rank):
        garden = grow_mlp(policy="never")
        garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
        garden.save(tmp_path / "0")
        garden.step(lambda: losses_of(garden.model, VECTORS))
        garden.save(tmp_path / "1")
        torch.distributed.barrier()
        host = MLP()
        told = refusal(lambda: esper.load(tmp_path / str(rank), host))
        return told, esper.load(tmp_path / "1", host).epoch

    for (kind, text), epoch in values_of(tmp_path, in_group(live)):
        assert kind is SettingError
        assert "epoch is 1 on rank 1 and 0 on rank 0" in text
        assert epoch == 1


# -- saves -----------------------------------------------------------------------------------------


@pytest.fixture
def own_blueprint(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))

    def register(width):
        @esper.blueprint("vector", "own_test", replace=True)
        def own_test(channels):
            return nn.Sequential(nn.Linear(channels, width), nn.Linear(width, channels))

    return register


def test_a_save_is_refused_where_a_blueprint_of_that_name_is_another_one(tmp_path, own_blueprint):
    own_blueprint(2)
    saved = grow_mlp(blueprints=["own_test"], policy="never")
    saved.save(tmp_path)
    own_blueprint(3)
    host = MLP()
    before = [value.clone() for value in host.state_dict().values()]
    with pytest.raises(SaveError, match=r"parameters\.r0c0\.own_test is \d+ in the save and \d+ h"):
        esper.load(tmp_path, host)
    assert all(map(torch.equal, before, host.state_dict().values()))
    other = grow_mlp(blueprints=["own_test"], policy="never")
    with pytest.raises(SaveError, match=r"parameters\.r0c0\.own_test"):
        other.restore(tmp_path)
    own_blueprint(2)
    assert esper.load(tmp_path, host).model.space.blueprint_ids == (None, "own_test")


def test_losses_are_not_restored_where_scores_are_measured(tmp_path):
    grow_mlp(policy="never").save(tmp_path)
    garden = grow_mlp(policy="never", higher_is_better=True)
    with pytest.raises(SaveError, match="higher_is_better is None in the save and True here"):
        garden.restore(tmp_path)


def test_a_garden_keeps_its_own_settings_when_it_is_restored(tmp_path):
    grow_mlp(policy="never").save(tmp_path)
    settings = GrowthSettings(lengths=StageLengths(ramp=3), blends=("gated",))
    garden = grow_mlp(policy="never", settings=settings, budget=5.0)
    garden.restore(tmp_path)
    assert garden.model.settings == settings
