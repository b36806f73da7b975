"""Copies that become members of their original's list:

order, names, counts; and a host as before where it fails.
"""

import copy
import dataclasses
import importlib.util
import warnings

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.copies.copying import copy_module
from esper.kasmina.copies.membership import insert_copies
from esper.kasmina.copies.order import runs_in_order
from esper.kasmina.hosts import build_transformer_host
from esper.kasmina.plain import grafts_of

TOKENS = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """A residual layer that knows its number and takes a second argument."""

    def __init__(self, number):
        super().__init__()
        self.layer_idx, self.gradient_checkpointing = number, False
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, features, strength=1.0):
        return features + strength * torch.tanh(self.mix(self.norm(features)))


@dataclasses.dataclass
class Config:
    n_layer: int = 2
    n_head: int = 2
    layer_types: tuple = ("near", "far")


class GPT(nn.Module):
    """A network as users write it: a configuration, a list, a loop."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config or Config()
        self.enter, self.leave = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Block(number) for number in range(self.config.n_layer))

    def forward(self, tokens):
        features = self.enter(tokens)
        for number in range(self.config.n_layer):
            features = self.blocks[number](features, strength=0.5)
        return self.leave(features)


def copy_of(host, name):
    return copy_module(host.get_submodule(name), host)[0]


def chain():
    return build_transformer_host(vocabulary=11, width=8, layers=2, heads=2, context=8, slots=2)


# -- inserting -------------------------------------------------------------------------------------


def test_copies_stand_right_behind_their_original_and_all_that_counts_follows():
    host = GPT()
    first, second = host.blocks
    new = [copy_of(host, "blocks.0"), copy_of(host, "blocks.0")]
    assert insert_copies(host, "blocks.0", new) == new
    assert list(host.blocks) == [first, *new, second]
    assert [block.layer_idx for block in host.blocks] == [0, 1, 2, 3]
    assert host.config == Config(4, 2, ("near", "near", "near", "far"))
    assert [name for name, _ in host.blocks.named_children()] == ["0", "1", "2", "3"]


def test_a_frozen_configuration_of_the_users_own_stays_as_it_is():
    frozen = dataclasses.make_dataclass("Frozen", [("n_layer", int, 2)], frozen=True)
    host = GPT(frozen())
    insert_copies(host, "blocks.1", [copy_of(host, "blocks.1")])
    assert (host.config.n_layer, len(host.blocks)) == (2, 3)
    assert runs_in_order(GPT(frozen()), TOKENS, ["blocks.1"])["blocks.1"] is not None


def test_members_of_a_sequential_keep_their_names_or_their_numbers():
    numbered = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    insert_copies(numbered, "1", [copy_of(numbered, "1")])
    assert [layer.out_features for layer in numbered] == [4, 4, 4, 2]
    named = nn.Sequential()
    for name in ("enter", "mix", "mix_copy1", "leave"):
        named.add_module(name, nn.Linear(4, 4))
    insert_copies(named, "mix", [copy_of(named, "mix"), copy_of(named, "mix")])
    assert list(named._modules) == ["enter", "mix", "mix_copy2", "mix_copy3", "mix_copy1", "leave"]


def test_a_member_has_the_flags_of_its_original():
    host = GPT()
    host.blocks[0].eval().gradient_checkpointing = True
    copied = copy_of(host, "blocks.0").train()
    assert not copied.gradient_checkpointing
    insert_copies(host, "blocks.0", [copied])
    assert copied.gradient_checkpointing
    assert not any(part.training for part in copied.modules())


def test_a_chain_host_gets_a_site_with_every_block():
    host = chain()
    block, site = host.blocks[0], host.sites[0]
    copied = copy_of(host, "blocks.0")
    assert insert_copies(host, "sites.0", [copied]) == [host.sites[1]]
    assert (host.blocks[0], host.blocks[1], host.sites[0]) == (block, copied, site)
    assert host.slot_config().num_slots == 3
    assert host(TOKENS).shape == (3, 7, 11)


def test_a_module_outside_a_list_cannot_have_a_copy_behind_it():
    with pytest.raises(ValueError, match="Block"):
        insert_copies(GPT(), "blocks.0.mix", [nn.Linear(8, 8)])


# -- the proof -------------------------------------------------------------------------------------


class Summed(GPT):
    """Adds outside of its layers: what follows a member gets more than its output."""

    def forward(self, tokens):
        features = self.enter(tokens)
        for block in self.blocks:
            features = features + block(features)
        return self.leave(features)


class Fixed(GPT):
    def forward(self, tokens):
        return self.leave(self.blocks[1](self.blocks[0](self.enter(tokens))))


class Counting(GPT):
    def forward(self, tokens):
        return super().forward(tokens) * len(self.blocks)


def test_layers_that_run_one_after_the_other_are_found():
    assert runs_in_order(GPT(), TOKENS, ["blocks.0", "blocks.1"]) == {
        "blocks.0": None,
        "blocks.1": None,
    }
    assert runs_in_order(chain(), TOKENS, ["sites.0", "sites.1"]) == {
        "sites.0": None,
        "sites.1": None,
    }


@pytest.mark.parametrize("build", [Summed, Fixed, Counting])
def test_a_network_in_which_one_more_member_is_not_one_more_layer_is_found(build):
    reasons = runs_in_order(build(), TOKENS, ["blocks.0", "leave"])
    assert None not in reasons.values()


@pytest.mark.parametrize("build", [GPT, Summed, Fixed, Counting, chain])
def test_the_proof_leaves_nothing_behind(build):
    host = build()
    before, keys = copy.deepcopy(host), list(host.state_dict())
    runs_in_order(host, TOKENS, [name for name, _ in host.named_modules() if name])
    assert [(n, type(m), m.training) for n, m in host.named_modules()] == [
        (n, type(m), m.training) for n, m in before.named_modules()
    ]
    assert list(host.state_dict()) == keys
    assert not any(module._forward_hooks for module in host.modules())
    assert torch.equal(host.eval()(TOKENS), before.eval()(TOKENS))
    if hasattr(host, "config"):
        assert (host.config, [block.layer_idx for block in host.blocks]) == (before.config, [0, 1])


# -- harvest and export ----------------------------------------------------------------------------

MIX = [
    ("r0c0", "mlp", "linear"),
    ("r0c0", "copy", "linear"),
    ("r0c0", "mlp", "gated"),
    ("r0c0", "copy", "linear"),
]
MIX += [("r0c0", "copy", "gated"), ("r0c1", "copy", "linear")]


def grown(host, slots, plan, example=TOKENS):
    """A garden whose fossils are those of the plan, with weights that differ from their
    originals'.
    """
    garden = esper.grow(host, slots=slots, example=example, max_seeds=9, blueprints=["copy", "mlp"])
    model = garden.model
    reasons = runs_in_order(model.host, example, list(model.slot_config.modules.values()))
    for slot_id, name in model.slot_config.modules.items():
        handed = model.slot(slot_id).inheritance
        model.slot(slot_id).inheritance = dataclasses.replace(
            handed, is_native=reasons[name] is None
        )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    torch.manual_seed(3)
    for choice in plan:
        model.build_in(*choice)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return garden


def rebuilt(folder, host):
    spec = importlib.util.spec_from_file_location("grown", folder / "grown.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.graft(host).eval()


HOSTS = {"own": (GPT, ["blocks.0", "blocks.1"]), "chain": (chain, ["sites.0", "sites.1"])}
every_host = pytest.mark.parametrize(("build", "slots"), HOSTS.values(), ids=HOSTS.keys())


@every_host
def test_copies_are_members_after_the_harvest_and_other_fossils_stay_grafted(build, slots):
    garden = grown(build(), slots, MIX)
    plain = garden.harvest()
    assert torch.equal(plain(TOKENS), garden.model(TOKENS))
    assert type(plain) is type(garden.model.host)
    assert len(plain.blocks) == 5
    stacks = [plain.get_submodule(name) for name in grafts_of(plain)]
    assert [len(list(stack.children())) for stack in stacks] == [1, 1, 1]


@every_host
def test_a_network_of_copies_alone_is_plain_modules(build, slots):
    garden = grown(build(), slots, [choice for choice in MIX if choice[1:] == ("copy", "linear")])
    plain = garden.harvest()
    assert torch.equal(plain(TOKENS), garden.model(TOKENS))
    assert not any(
        "esper.kasmina.copies.copying" in type(module).__module__ for module in plain.modules()
    )
    assert not any(module._forward_hooks for module in plain.modules())


@every_host
def test_an_export_rebuilds_copies_on_a_fresh_host(build, slots, tmp_path):
    garden = grown(build(), slots, MIX)
    fresh = rebuilt(garden.export(tmp_path), build())
    assert torch.equal(fresh(TOKENS), garden.model(TOKENS))
    assert "esper" not in {
        line.split()[1].split(".")[0] for line in imports_of(tmp_path / "grown.py")
    }


def imports_of(path):
    return [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]


def test_an_export_without_copies_carries_no_source_for_them(tmp_path):
    garden = grown(GPT(), ["blocks.0"], [("r0c0", "mlp", "linear")])
    garden.export(tmp_path)
    assert "class Copy" not in (tmp_path / "grown.py").read_text()


@every_host
def test_a_harvested_network_grows_again(build, slots):
    once = grown(build(), slots, MIX).harvest()
    garden = grown(once, slots, MIX)
    assert torch.equal(garden.harvest()(TOKENS), garden.model(TOKENS))


def test_where_the_proof_fails_copies_stay_grafted():
    garden = grown(Fixed(), ["blocks.0"], [("r0c0", "copy", "linear")])
    plain = garden.harvest()
    assert len(plain.blocks) == 2
    assert torch.equal(plain(TOKENS), garden.model(TOKENS))


class Odd(GPT):
    """Can be saved, and counts its layers in a field that nobody knows."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config or {"how_many": 2}

    def forward(self, tokens):
        features = self.enter(tokens)
        for block in self.blocks:
            features = block(features)
        return self.leave(features)

    def save_pretrained(self, folder):
        pass


def test_a_family_that_nobody_knows_is_refused_with_the_host_as_before():
    host = Odd()
    before, blocks = list(host.state_dict()), list(host.blocks)
    with pytest.raises(ValueError, match=r"dict .*\b2\b.*\b3"):
        insert_copies(host, "blocks.0", [copy_of(host, "blocks.0")])
    assert (list(host.state_dict()), list(host.blocks), host.config) == (
        before,
        blocks,
        {"how_many": 2},
    )
    assert [block.layer_idx for block in host.blocks] == [0, 1]
    assert "dict" in runs_in_order(host, TOKENS, ["blocks.0"])["blocks.0"]


def test_a_copy_that_the_configuration_cannot_follow_runs_where_it_grew_and_that_is_told():
    garden = grown(Odd(), ["blocks.0"], [("r0c0", "copy", "linear")])
    assert torch.equal(garden.harvest()(TOKENS), garden.model(TOKENS))
    slot = garden.model.slot("r0c0")
    slot.inheritance = dataclasses.replace(slot.inheritance, is_native=True)
    with pytest.warns(UserWarning, match=r"save_pretrained .*r0c0.*dict"):
        plain = garden.harvest()
    assert torch.equal(plain(TOKENS), garden.model(TOKENS))


def test_fossils_that_save_pretrained_would_drop_are_told():
    class Saving(GPT):
        def save_pretrained(self, folder):
            pass

    with pytest.warns(UserWarning, match="save_pretrained"):
        grown(Saving(), ["blocks.0"], [("r0c0", "mlp", "linear")]).harvest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        garden = grown(Saving(), ["blocks.0"], [("r0c0", "copy", "linear")])
        assert len(garden.harvest().blocks) == 3
