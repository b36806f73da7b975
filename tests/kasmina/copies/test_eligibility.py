"""Copies of awkward modules:

changing in place, told apart by a flag, frozen, beside caches, with a graph.
"""

import multiprocessing

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import REGISTRY, blueprint
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import BlueprintMismatchError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from kasmina.copies.test_copying import TOKENS, WIDTH, Block, Net, grow, keep


def test_a_module_that_changes_its_input_in_place_is_not_copied():
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.conv = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, features):
            return features + self.conv(self.act(features))

    net = nn.Sequential(nn.Conv2d(3, 4, 1), Unit())
    with pytest.raises(BlueprintMismatchError, match="in place"):
        esper.grow(net, slots="1", example=torch.randn(2, 3, 5, 5), blueprints=["copy"])


def test_modules_that_are_built_alike_and_differ_by_a_flag_are_each_proven():
    class Maybe(Block):
        def forward(self, features, scale, *, shift=None):
            grown = super().forward(features, scale, shift=shift)
            return grown if self.is_residual else grown - features

    net = Net()
    net.blocks = nn.ModuleList(Maybe(net.table) for _ in range(2))
    net.blocks[0].is_residual, net.blocks[1].is_residual = True, False
    model = grow(net, blueprints=["copy", "copy_zero"])
    assert ("r0c0", "copy_zero", "linear") in model.costs
    assert ("r0c1", "copy_zero", "linear") not in model.costs


def test_a_frozen_parameter_stays_frozen_in_the_copy_and_a_frozen_module_learns():
    net = Net()
    net.blocks[0].norm.weight.requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    slots = SlotConfig.for_modules(["blocks.0", "blocks.1"])
    model = MorphogeneticModel(net, slots, example=TOKENS, blueprints=["copy"])
    first, second = keep(model, "r0c0"), keep(model, "r0c1")
    assert not first.body.norm.weight.requires_grad
    assert all(parameter.requires_grad for parameter in second.parameters())


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_optimiser_of_two_groups_is_resumed_beside_kept_copies(tmp_path, is_frozen):
    def build():
        net = Net()
        net.blocks.requires_grad_(not is_frozen)
        return net

    def optimizer_of(garden):
        own = [p for p in garden.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in own if (p.dim() > 1) == flag], "weight_decay": 0.1 * flag}
            for flag in (1, 0)
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    settings = GrowthSettings(lengths=StageLengths(ramp=0))
    options = {
        "blueprints": ["copy"],
        "max_seeds": 9,
        "policy": "schedule:epochs=0:places=r0c0.copy",
    }
    garden = esper.grow(build(), slots="blocks.*", example=TOKENS, settings=settings, **options)
    garden.attach(optimizer_of(garden))
    garden.step(lambda: torch.rand(4))
    garden.save(tmp_path)
    again = esper.load(tmp_path, build())
    again.attach(optimizer_of(again))
    names = [
        [len(group["params"]) for group in g.model.link.optimizer.param_groups]
        for g in (garden, again)
    ]
    assert names[0] == names[1]


def test_an_own_cache_is_refused_beside_a_live_copy():
    fossil = keep(grow(), "r0c0")
    fossil.body.forward = lambda features, cache=None: features
    with pytest.raises(RuntimeError, match="use_cache=False"):
        fossil(torch.randn(2, 5, WIDTH), cache={"keys": []})


def test_what_a_forward_pass_left_in_an_attribute_does_not_keep_a_module_from_being_copied():
    model = grow()
    block = model.host.blocks[0]
    block.aux = block.linear.weight.square().sum()
    fossil = keep(model, "r0c0")
    assert fossil.body.aux.grad_fn is None


def test_a_blueprint_that_shares_weights_with_the_host_is_refused(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    blueprint("sequence", "thief")(
        lambda channels, site: nn.Sequential(nn.LayerNorm(channels), site.module.linear)
    )
    with pytest.raises(BlueprintMismatchError, match="shares"):
        grow(blueprints=["thief"])


def test_a_slot_inside_keeps_its_module_from_being_copied_whatever_its_shape():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, features):
            return features + self.down(self.up(features))

    model = esper.grow(Wide(), slots=["up"], example=torch.randn(3, 4), blueprints=["lora"]).model
    assert model.slot("r0c0").inheritance.problem is not None
    net = nn.Sequential(Wide())
    with pytest.raises(BlueprintMismatchError, match=r"carries.*own"):
        esper.grow(net, slots=["0", "0.up"], example=torch.randn(3, 4), blueprints=["copy"])


def grow_normed():
    block = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))
    net = nn.Sequential(nn.Conv2d(3, 4, 1), block).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    esper.grow(net, slots="1", example=images, blueprints=["copy"])


def test_a_group_norm_on_channels_last_features_can_be_copied_and_does_not_end_the_process():
    """torch crashes where such a norm needs gradients of its weights and none of its input."""
    process = multiprocessing.get_context("fork").Process(target=grow_normed)
    process.start()
    process.join()
    assert process.exitcode == 0
