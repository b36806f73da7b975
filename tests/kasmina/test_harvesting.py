"""Taking the grown network home as a plain module, equal to the bit, of the host's own class,
exportable.
"""

import copy

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import HostError
from esper.leyline.settings import GrowthSettings
from user_models import (
    CNN,
    MLP,
    Encoder,
    TiedLanguageModel,
    losses_of,
    made_up,
    random_images,
    random_vectors,
    script,
    sequential_net,
    train_epoch,
)

IMAGES = random_images(16)
TOKENS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
LINEAR, GATED = 0, 2


def grown(host, slots, inputs, blends, *, blueprints=None, unfinished=True):
    """A garden with one fossil per blend in its first slot, and a seed on probation in its last
    slot, if wanted.
    """
    choices = {}
    for generation, blend in enumerate(blends):
        choices |= {5 * generation: (1, 0, 1, blend), 5 * generation + 3: (3, 0, 0, 0)}
    garden = esper.grow(
        host,
        slots=slots,
        example=inputs,
        blueprints=blueprints,
        max_seeds=9,
        policy=script(choices, keeps=False),
        settings=GrowthSettings(scale_at_birth=1.0),
    )
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.02)
    garden.attach(optimizer)
    for epoch in range(5 * len(blends)):
        if unfinished and epoch == 5 * len(blends) - 4:
            garden.model.germinate_seed(
                garden.model.slot_config.slot_ids[-1], garden.model.space.blueprint_ids[1]
            )
        optimizer.zero_grad()
        garden.model.train()(inputs).square().mean().backward()
        optimizer.step()
        garden.step(made_up(garden))
    assert (garden.model.fossilized_seeds, garden.model.active_seeds) == (
        len(blends),
        int(unfinished),
    )
    return garden


def with_unfinished_off(garden, inputs):
    """What the grown network computes without its live seeds, in eval mode."""
    model = garden.model.eval()
    with torch.no_grad():
        for slot_id in model.slot_config.slot_ids:
            model.slot(slot_id).alpha.fill_(0.0)
        try:
            return model(inputs)
        finally:
            for slot_id in model.slot_config.slot_ids:
                model.slot(slot_id).alpha.fill_(model.slot(slot_id).state.alpha)


def output(module, inputs):
    with torch.no_grad():
        return module.eval()(inputs)


HOSTS = {
    "cnn": (CNN, ["layer1", "layer2"], IMAGES),
    "mlp": (MLP, ["enter", "middle"], random_vectors(16)),
    "sequential root": (sequential_net, ["0", "2"], random_vectors(16)),
    "encoder layers": (lambda: Encoder(True), ["encoder.layers.0", "encoder.layers.1"], TOKENS),
    "inside an encoder": (
        lambda: Encoder(True),
        ["encoder.layers.0.linear1", "encoder.layers.1"],
        TOKENS,
    ),
    "tokens first": (lambda: Encoder(False), ["encoder.layers.0", "encoder.layers.1"], TOKENS),
}
every_host = pytest.mark.parametrize(("host", "slots", "inputs"), HOSTS.values(), ids=HOSTS.keys())


@pytest.mark.parametrize(
    "blends", [[LINEAR], [GATED], [LINEAR, GATED, LINEAR]], ids=["linear", "gated", "three"]
)
@every_host
def test_a_harvest_equals_the_grown_network_with_unfinished_slots_off_to_the_bit(
    host, slots, inputs, blends
):
    garden = grown(host(), slots, inputs, blends)
    plain = garden.harvest()
    assert torch.equal(output(plain, inputs), with_unfinished_off(garden, inputs))


def test_the_fossils_of_a_harvest_do_something():
    garden = grown(CNN(), ["layer1", "layer2"], IMAGES, [LINEAR])
    bare = copy.deepcopy(garden.model.host)
    for module in bare.modules():
        module._forward_hooks.clear()
    assert not torch.equal(output(garden.harvest(), IMAGES), output(bare, IMAGES))


def test_an_unfinished_seed_is_left_out():
    garden = grown(CNN(), ["layer1", "layer2"], IMAGES, [LINEAR])
    plain = garden.harvest()
    assert [name for name, _ in plain.layer1.grown.named_children()] == ["0"]
    assert not hasattr(plain.layer2, "grown")
    assert not torch.equal(output(plain, IMAGES), output(garden.model, IMAGES))


@every_host
def test_a_harvest_is_of_the_hosts_own_class(host, slots, inputs):
    fresh = host()
    plain = grown(host(), slots, inputs, [LINEAR]).harvest()
    assert type(plain) is type(fresh)
    assert type(plain.get_submodule(slots[0])) is type(fresh.get_submodule(slots[0]))


@every_host
def test_a_harvest_keeps_the_hosts_keys_and_adds_only_grown_ones(host, slots, inputs):
    fresh = host().state_dict()
    keys = grown(host(), slots, inputs, [LINEAR, GATED]).harvest().state_dict()
    assert [key for key in keys if ".grown." not in key] == list(fresh)
    assert {key.split(".grown.")[0] for key in keys if ".grown." in key} == {slots[0]}


def test_a_harvest_shares_nothing_with_the_garden():
    garden = grown(CNN(), ["layer1", "layer2"], IMAGES, [LINEAR])
    before = {name: value.clone() for name, value in garden.model.state_dict().items()}
    plain = garden.harvest()
    train_epoch(plain, torch.optim.SGD(plain.parameters(), lr=0.5), 0, IMAGES)
    assert all(
        torch.equal(value, before[name]) for name, value in garden.model.state_dict().items()
    )


def test_a_harvest_without_fossils_is_the_bare_host_without_hooks():
    garden = grown(CNN(), ["layer1", "layer2"], IMAGES, [], unfinished=False)
    plain = garden.harvest()
    assert list(plain.state_dict()) == list(CNN().state_dict())
    assert not any(module._forward_hooks for module in plain.modules())


def test_the_users_own_hooks_survive_the_harvest():
    host = CNN()
    host.layer1.register_forward_hook(double)
    garden = grown(host, ["layer1", "layer2"], IMAGES, [LINEAR])
    assert next(iter(garden.harvest().layer1._forward_hooks.values())) is double


def double(module, inputs, result):
    return 2 * result


def test_a_hook_of_the_users_on_a_sequential_site_keeps_its_place_before_the_fossils():
    host = CNN()
    host.layer1.register_forward_hook(double)
    garden = grown(host, ["layer1", "layer2"], IMAGES, [LINEAR])
    assert torch.equal(output(garden.harvest(), IMAGES), with_unfinished_off(garden, IMAGES))


def test_a_harvest_can_be_trained_on():
    plain = grown(CNN(), ["layer1", "layer2"], IMAGES, [GATED]).harvest()
    losses_of(plain.train(), IMAGES).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in plain.parameters())


def test_tied_weights_stay_tied_in_a_harvest():
    tokens = torch.randint(7, (4, 5))
    garden = grown(TiedLanguageModel(), ["body.1", "body"], tokens, [LINEAR], blueprints=["mlp"])
    plain = garden.harvest()
    assert plain.head.weight is plain.embedding.weight
    assert torch.equal(output(plain, tokens), with_unfinished_off(garden, tokens))


class Loop(nn.Sequential):
    """A Sequential with a forward of its own, so it does not run a grafted child by itself."""

    def forward(self, inputs):
        return self[0](inputs).tanh()


def test_a_sequential_with_its_own_forward_is_harvested_right():
    inputs = random_vectors(16)
    host = nn.Sequential(Loop(nn.Linear(6, 8)), nn.Linear(8, 3))
    garden = grown(host, ["0", "1"], inputs, [LINEAR])
    assert torch.equal(output(garden.harvest(), inputs), with_unfinished_off(garden, inputs))


class Taken(nn.Module):
    """Uses the name that fossils would go under."""

    def __init__(self):
        super().__init__()
        self.grown = nn.Linear(6, 6)

    def forward(self, inputs):
        return self.grown(inputs)


def test_a_module_that_already_has_something_grown_is_refused_by_name():
    inputs = random_vectors(16)
    garden = grown(nn.Sequential(Taken(), nn.Linear(6, 3)), ["0", "1"], inputs, [LINEAR])
    with pytest.raises(HostError, match=r"slot r0c0 .*Taken .*'grown'"):
        garden.harvest()


def test_a_refused_harvest_leaves_the_garden_as_it_was():
    inputs = random_vectors(16)
    garden = grown(nn.Sequential(Taken(), nn.Linear(6, 3)), ["0", "1"], inputs, [LINEAR])
    before = output(garden.model, inputs)
    with pytest.raises(HostError):
        garden.harvest()
    assert torch.equal(output(garden.model, inputs), before)


@pytest.mark.parametrize("blend", [LINEAR, GATED], ids=["linear", "gated"])
def test_torch_export_takes_a_harvest(blend):
    plain = grown(CNN(), ["layer1", "layer2"], IMAGES, [blend]).harvest().eval()
    exported = torch.export.export(plain, (IMAGES,)).module()
    torch.testing.assert_close(exported(IMAGES), output(plain, IMAGES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_runs_a_harvest_to_five_digits(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    plain = grown(CNN(), ["layer1.0", "layer2"], IMAGES, [LINEAR, GATED]).harvest().eval()
    path = tmp_path / "plain.onnx"
    torch.onnx.export(plain, (IMAGES,), str(path), dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), output(plain, IMAGES), atol=1e-5, rtol=1e-5)
