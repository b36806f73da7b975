"""Seeds that inherit:

what a copy is, what it shares, what it costs, how it is trained, saved and refused.
"""

import copy

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import REGISTRY, blueprint
from esper.kasmina.checks import check_blueprint
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.copies.eligibility import find_zeroed
from esper.kasmina.hosts import build_transformer_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import BlueprintError, BlueprintMismatchError, BudgetExceededError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig

WIDTH = 8
TOKENS = torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block that needs a second argument and takes its features by name."""

    def __init__(self, table):
        super().__init__()
        self.table = table  # shared by all blocks
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, features, scale, *, shift=None):
        mixed = self.linear(self.norm(features + self.table.weight[: features.shape[1]]))
        return features + self.drop(mixed) * scale + (0.0 if shift is None else shift)


class Net(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Embedding(16, WIDTH)
        self.table = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block(self.table) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens):
        features, scale = self.enter(tokens), torch.tensor(0.5)
        for block in self.blocks:
            features = block(features=features, scale=scale, shift=0.0)
        return self.head(features)


def grow(net=None, slots=("blocks.0", "blocks.1"), **options):
    options.setdefault("settings", GrowthSettings(lengths=StageLengths(ramp=2)))
    options.setdefault("blueprints", ["copy", "copy_zero"])
    model = MorphogeneticModel(
        net or Net(), SlotConfig.for_modules(slots), example=TOKENS, **options
    )
    model.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    return model


def logits(model):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(TOKENS)


def by_hand(net, order):
    """The network with its blocks run in this order."""
    features = net.enter(TOKENS)
    for block in order:
        features = block(features=features, scale=torch.tensor(0.5), shift=0.0)
    return net.head(features)


def keep(model, slot_id, name="copy", blend="linear"):
    model.build_in(slot_id, name, blend)
    return model.slot(slot_id).fossils[-1]


def learn(model, steps=1):
    model.train()
    for _ in range(steps):
        model.link.optimizer.zero_grad()
        nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        model.link.optimizer.step()


def test_a_ramp_goes_from_the_old_function_to_host_then_copy_to_the_bit():
    model = grow()
    alone = logits(model)
    model.germinate_seed("r0c0", "copy")
    assert torch.equal(logits(model), alone)
    model.tick()
    half = logits(model)
    assert not torch.equal(half, alone)
    model.tick()
    model.slot("r0c0").alpha.fill_(1.0)
    net = model.host.eval()
    inside = model.slot("r0c0").seed.body.eval()
    hooks, net.blocks[0]._forward_hooks = net.blocks[0]._forward_hooks, {}
    with torch.no_grad():
        expected = by_hand(net, [net.blocks[0], inside, net.blocks[1]])
    net.blocks[0]._forward_hooks = hooks
    assert torch.equal(logits(model), expected)


def test_a_culled_copy_leaves_everything_as_before_to_the_bit():
    model = grow()
    learn(model)
    before, state = logits(model), copy.deepcopy(model.link.optimizer.state_dict())
    model.germinate_seed("r0c0", "copy")
    model.tick()
    model.cull_seed("r0c0")
    assert torch.equal(logits(model), before)
    after = model.link.optimizer.state_dict()
    assert all(
        torch.equal(state["state"][key][name], value)
        for key in state["state"]
        for name, value in after["state"][key].items()
    )


def test_a_zeroed_copy_is_the_identity_and_learns():
    model = grow()
    before = logits(model)
    fossil = keep(model, "r0c1", "copy_zero")
    assert torch.equal(logits(model), before)
    weights = [p.clone() for p in fossil.parameters()]
    learn(model, 2)
    assert any(
        not torch.equal(old, new) for old, new in zip(weights, fossil.parameters(), strict=True)
    )


def test_what_the_original_shares_stays_shared_and_is_not_the_copys_own():
    model = grow()
    before = model.total_params
    fossil = keep(model, "r0c0")
    assert fossil.body.table is model.host.table
    own = WIDTH * WIDTH + 3 * WIDTH
    assert (
        sum(p.numel() for p in fossil.parameters()) == own == model.costs["r0c0", "copy", "linear"]
    )
    assert model.total_params == before + own == sum(p.numel() for p in model.parameters())


def test_a_shared_parameter_survives_a_cull_in_the_optimiser():
    model = grow()
    model.germinate_seed("r0c0", "copy")
    model.tick()
    model.cull_seed("r0c0")
    assert {id(parameter) for parameter in model.host.parameters()} <= model.link.owners().keys()


def test_a_later_copy_copies_the_last_block_that_is_there():
    model = grow()
    first = keep(model, "r0c0")
    with torch.no_grad():
        first.body.linear.bias.fill_(7.0)
    second = keep(model, "r0c0")
    assert torch.equal(second.body.linear.bias, first.body.linear.bias)
    assert second.body.linear.bias is not first.body.linear.bias


def test_a_copy_takes_over_the_optimiser_settings_of_its_originals():
    model = MorphogeneticModel(
        Net(),
        SlotConfig.for_modules(["blocks.0"]),
        example=TOKENS,
        blueprints=["copy"],
        settings=GrowthSettings(),
    )
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.3, "lr": 0.02},
        {"params": plain, "weight_decay": 0.0, "lr": 0.05},
    ]
    model.attach(torch.optim.AdamW(groups))
    fossil = keep(model, "r0c0")
    owner = {id(p): group for group in model.link.optimizer.param_groups for p in group["params"]}
    for name, parameter in fossil.body.named_parameters():
        if "table" not in name:
            expected = (0.3, 0.02) if parameter.dim() > 1 else (0.0, 0.05)
            assert (owner[id(parameter)]["weight_decay"], owner[id(parameter)]["lr"]) == expected, (
                name
            )


def test_a_live_copy_is_saved_and_goes_on_to_the_bit(tmp_path):
    def run(garden, optimizer, steps):
        for _ in range(steps):
            garden.model.train()
            torch.manual_seed(garden.epoch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                garden.model(TOKENS).flatten(0, 1), TOKENS.flatten()
            ).backward()
            optimizer.step()
            garden.step(
                lambda: nn.functional.cross_entropy(
                    garden.model(TOKENS).transpose(1, 2), TOKENS, reduction="none"
                ).mean(1)
            )

    def begin(garden):
        optimizer = torch.optim.AdamW(garden.parameters(), lr=0.01)
        garden.attach(optimizer)
        return optimizer

    plan = "schedule:epochs=0+0+1:places=r0c0.copy+r0c0.copy+r0c1.copy_zero"
    garden = esper.grow(
        Net(),
        slots="blocks.*",
        example=TOKENS,
        blueprints=["copy", "copy_zero"],
        max_seeds=9,
        policy=plan,
    )
    optimizer = begin(garden)
    run(garden, optimizer, 3)
    assert garden.model.active_seeds > 0
    garden.save(tmp_path)
    run(garden, optimizer, 6)
    again = esper.load(tmp_path, Net())
    run(again, begin(again), 6)
    assert again.model.fossilized_seeds == garden.model.fossilized_seeds > 0
    ours, theirs = garden.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_without_a_ramp_all_copies_of_a_decision_are_kept_at_once():
    plan = "schedule:epochs=1+1+1:places=r0c0.copy+r0c0.copy+r0c1.copy"
    settings = GrowthSettings(lengths=StageLengths(ramp=0))
    options = {"blueprints": ["copy"], "max_seeds": 9, "policy": plan, "settings": settings}
    garden = esper.grow(Net(), slots="blocks.*", example=TOKENS, **options)
    garden.attach(torch.optim.AdamW(garden.parameters(), lr=0.01))
    for _ in range(2):
        garden.step(
            lambda: nn.functional.cross_entropy(
                garden.model(TOKENS).transpose(1, 2), TOKENS, reduction="none"
            ).mean(1)
        )
    assert [len(garden.model.slot(slot).fossils) for slot in ("r0c0", "r0c1")] == [2, 1]
    moves = [event for event in garden.history if type(event).__name__ == "StageChanged"]
    assert [(move.epoch, move.after) for move in moves].count((2, "FOSSILIZED")) == 3


def test_a_copy_that_exceeds_the_budget_is_refused():
    model = grow(budget=sum(p.numel() for p in Net().parameters()) + 100)
    keep(model, "r0c0")
    with pytest.raises(BudgetExceededError, match="copy"):
        model.germinate_seed("r0c1", "copy")


def test_places_that_cannot_be_copied_say_why():
    net = Net()
    places = {place.name: place for place in esper.inspect(net, TOKENS)}
    assert "shape" in places["enter"].copy_problem
    assert "shape" in places["head"].copy_problem
    assert places["blocks.0"].copy_problem is None
    assert "weights" in places["blocks.0.drop"].copy_problem
    assert "no copy" in str(places["head"])
    with pytest.raises(BlueprintMismatchError, match=r"input.*shape"):
        grow(net, ["head"])


def test_a_module_with_a_slot_inside_is_not_copied():
    model = grow(slots=["blocks.0.linear", "blocks.0"])
    assert {slot_id for slot_id, _, _ in model.costs} == {"r0c0"}


@pytest.mark.parametrize("spoil", ["forward", "quantised"])
def test_modules_that_somebody_changed_are_not_copied(spoil):
    net = Net()
    if spoil == "forward":
        net.blocks[0].linear.forward = net.blocks[0].linear.forward
    else:
        weight = nn.Parameter(net.blocks[0].linear.weight.data.to(torch.int8), requires_grad=False)
        net.blocks[0].linear.weight = weight
        net.blocks[0].linear.forward = lambda features: features
    place = next(place for place in esper.inspect(net, TOKENS) if place.name == "blocks.0")
    assert place.copy_problem is not None


def test_a_block_that_normalises_last_has_no_identity():
    layer, features = (
        nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(),
        torch.randn(2, 3, 8),
    )
    with torch.no_grad(), pytest.raises(ValueError, match="zeros"):
        find_zeroed(layer, lambda module: module(features), features)


def test_a_block_costs_the_same_by_whichever_blueprint_it_is_copied(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    blueprint("sequence", "block")(lambda channels, site: site.copy())
    host = build_transformer_host(vocabulary=16, width=WIDTH, layers=2, heads=2, context=5)
    prices = MorphogeneticModel(host, blueprints=("copy", "block")).slot("r0c0").prices
    assert prices["block", False].flops == prices["copy", False].flops


def test_pricing_leaves_what_a_copy_shares_with_the_network_as_it_is(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    blueprint("vector", "tied")(lambda channels, site: site.copy())
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)).double()
    net[0][0].weight = net[1].weight
    with pytest.raises(BlueprintMismatchError, match="shares"):
        MorphogeneticModel(
            net,
            SlotConfig.for_modules(["0"]),
            example=torch.zeros(2, 4).double(),
            blueprints=("tied",),
        )
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}


def test_a_blueprint_of_ones_own_may_ask_for_the_site(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))

    @blueprint("sequence", "branch")
    def branch(channels, site):
        assert isinstance(site, Site)
        return nn.Sequential(nn.LayerNorm(channels), site.copy().linear)

    with pytest.raises(BlueprintError, match="module"):
        check_blueprint("sequence", "branch")
    model = grow(blueprints=["branch"])
    before = logits(model)
    fossil = keep(model, "r0c0", "branch")
    assert torch.equal(logits(model), before)
    assert torch.equal(fossil.body[1].weight, model.host.blocks[0].linear.weight)
    assert model.costs["r0c0", "branch", "linear"] == WIDTH * WIDTH + 4 * WIDTH


def test_the_built_in_gpt_grows_deeper_by_its_own_blocks():
    host = build_transformer_host(vocabulary=16, width=8, layers=2, heads=2, context=5, slots=2)
    model = MorphogeneticModel(host, blueprints=["copy", "copy_zero"])
    model.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    before = logits(model)
    keep(model, "r0c1", "copy_zero")
    assert torch.equal(logits(model), before)
    assert isinstance(
        keep(model, "r0c0" if ("r0c0", "copy", "linear") in model.costs else "r0c1"), Copy
    )


def test_a_gated_copy_starts_half_in():
    model = grow()
    fossil = keep(model, "r0c0", "copy", "gated")
    features, scale = torch.randn(2, 5, WIDTH), torch.tensor(0.5)
    fossil.eval()
    expected = torch.lerp(features, fossil.body(features, scale), 0.5)
    assert torch.allclose(fossil(features, scale), expected)


def test_copies_are_planted_only_where_somebody_names_them():
    garden = esper.grow(Net(), slots="blocks.*", example=TOKENS, budget=3.0)
    assert not {"copy", "copy_zero"} & set(garden.model.space.blueprint_ids)


def test_the_price_of_a_copy_follows_the_module():
    model = grow()
    before = model.view().costs["r0c0", "copy", "linear"]
    model.host.blocks[0].extra = nn.Parameter(torch.zeros(5))
    assert model.view().costs["r0c0", "copy", "linear"] == before + 5
    assert model.view().costs["r0c1", "copy", "linear"] == before
