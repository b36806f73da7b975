"""A harvest is made of torch's and the host's own modules: it runs without Esper."""

import copy
import io
import pickletools
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import esper
from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.copies.copying import Copy
from esper.kasmina.plain import grafts_of
from esper.leyline.errors import HostError
from kasmina.plain_hosts import Cache, Decoder, Dense, Images, Layer, Open, Tokens

DRAW = torch.Generator().manual_seed(1)
IMAGES = torch.randn(4, 1, 6, 6, generator=DRAW)
TOKENS = torch.randn(4, 5, 8, generator=DRAW)
TESTS = str(Path(__file__).parents[1])


def grown(host, plan, example):
    """A garden with these fossils, a (module, blueprint, blend) each, whose weights are drawn."""
    torch.manual_seed(0)
    slots = list(dict.fromkeys(module for module, *_ in plan))
    names = list(dict.fromkeys(blueprint for _, blueprint, _ in plan))
    garden = esper.grow(
        host, slots=slots, example=example, blueprints=names, max_seeds=99, policy="never"
    )
    slot_of = {module: slot_id for slot_id, module in garden.model.slot_config.modules.items()}
    for module, blueprint, blend in plan:
        garden.model.build_in(slot_of[module], blueprint, blend)
    with torch.no_grad():
        for parameter in garden.model.slots.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    garden.model.eval()
    return garden


def plan_of(kind, modules):
    """Every blueprint of a kind, in turn on one of two modules, every third blended by a gate."""
    names = [*[name for name in REGISTRY.names(kind) if "copy" not in name], "sham"]
    blends = ("linear", "gated", "linear")
    return [(modules[number % 2], name, blends[number % 3]) for number, name in enumerate(names)]


def images():
    return grown(Images(), plan_of("image", ["enter", "middle"]), IMAGES)


def tokens():
    return grown(Tokens(), plan_of("sequence", ["encoder.layers.0", "encoder.layers.1"]), TOKENS)


def decoder():
    plan = [
        ("layers.1", "copy", "linear"),
        ("layers.1", "mlp", "gated"),
        ("layers.1", "copy", "gated"),
    ]
    return grown(Decoder(), plan, TOKENS)


def dense():
    plan = [
        ("block.second", "lora", "linear"),
        ("block", "mlp", "gated"),
        ("block", "lora", "linear"),
    ]
    return grown(Dense(), plan, TOKENS)


GARDENS = {
    "images": (images, IMAGES),
    "tokens": (tokens, TOKENS),
    "decoder": (decoder, TOKENS),
    "dense": (dense, TOKENS),
}
every_garden = pytest.mark.parametrize(("build", "inputs"), GARDENS.values(), ids=GARDENS.keys())


def harvested(garden):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return garden.harvest().eval()


def pickled(network):
    file = io.BytesIO()
    torch.save(network, file)
    return file


WITHOUT_ESPER = """
    import copy, io, sys

    class NoEsper:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "esper":
                raise ModuleNotFoundError(f"No module named {name!r}")

    sys.meta_path.insert(0, NoEsper())
    sys.path.insert(0, sys.argv[1])
    import torch

    for network, inputs, expected in torch.load(sys.argv[2], weights_only=False):
        assert torch.equal(network(inputs), expected)
        again = io.BytesIO()
        torch.save(copy.deepcopy(network), again)
        again.seek(0)
        assert torch.equal(torch.load(again, weights_only=False)(inputs), expected)
        exported = torch.export.export(network, (inputs,)).module()
        torch.testing.assert_close(exported(inputs), expected)
        network.train()(inputs).square().mean().backward()
        assert all(p.grad is not None for p in network.parameters())
    print("all of it", end="")
"""


def test_harvests_are_loaded_trained_and_exported_where_esper_is_not_installed(tmp_path):
    rows = []
    for build, inputs in GARDENS.values():
        garden = build()
        rows.append((harvested(garden), inputs, garden.model(inputs).detach()))
    torch.save(rows, tmp_path / "rows.pt")
    program = [sys.executable, "-c", textwrap.dedent(WITHOUT_ESPER), TESTS, tmp_path / "rows.pt"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("all of it", 0), done.stderr


@every_garden
def test_a_harvest_holds_nothing_of_esper_in_modules_and_hooks(build, inputs):
    file = pickled(harvested(build()))
    data = torch._C.PyTorchFileReader(io.BytesIO(file.getvalue())).get_record("data.pkl")
    texts = [text for _, text, _ in pickletools.genops(data) if isinstance(text, str)]
    assert len(texts) > 50
    assert not [text for text in texts if text.startswith("esper")]


def test_a_plain_sequential_runs_its_fossils_as_its_last_member_without_a_hook():
    network = harvested(images())
    assert not network.enter._forward_hooks
    assert type(network.enter) is nn.Sequential
    assert type(network.enter.grown) is nn.Sequential
    assert [type(hook).__mro__[1] for hook in network.middle._forward_hooks.values()] == [
        GraphModule
    ]


def test_fossils_on_a_dict_of_layers_are_no_layer_of_it(tmp_path):
    garden = dense()
    network = harvested(garden)
    assert list(network.block) == ["first", "second"]
    assert list(grafts_of(network)) == ["block.second.grown", "block.second.grown_around"]
    scope = {"__name__": "grown", "__file__": str(garden.export(tmp_path) / "grown.py")}
    exec((tmp_path / "grown.py").read_text(), scope)
    assert torch.equal(scope["graft"](Dense()).eval()(TOKENS), garden.model(TOKENS))


@every_garden
def test_a_harvest_grows_and_is_harvested_again(build, inputs):
    once = harvested(build())
    first = next(grafts_of(once))
    site = first.removesuffix(".grown")
    count = len(list(once.get_submodule(first).children()))
    again = grown(copy.deepcopy(once), [(site, "norm", "linear")], inputs)
    twice = harvested(again)
    assert torch.equal(twice(inputs), again.model(inputs))
    assert not torch.equal(twice(inputs), once(inputs))
    assert len(list(twice.get_submodule(first).children())) == count + 1


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        pytest.param(*GARDENS["decoder"], id="decoder"),
        pytest.param(*GARDENS["images"], id="images", marks=pytest.mark.slow),
        pytest.param(*GARDENS["tokens"], id="tokens", marks=pytest.mark.slow),
    ],
)
def test_a_harvest_is_compiled_as_one_graph(build, inputs):
    torch._dynamo.reset()
    network = harvested(build())
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), network(inputs))
    torch.export.export(network, (inputs,), strict=True)


@every_garden
def test_under_autocast_a_harvest_computes_what_the_garden_does(build, inputs):
    garden = build()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        network = harvested(garden)
        assert torch.equal(network(inputs), garden.model(inputs))


def test_in_half_precision_the_seeds_of_a_harvest_follow():
    network = harvested(images()).to(torch.bfloat16)
    assert network(IMAGES.bfloat16()).dtype is torch.bfloat16


def test_a_seed_on_a_fossil_of_a_harvest_is_refused_because_copies_would_lose_it():
    network = harvested(images())
    with pytest.raises(HostError, match=r"middle\.grown\.0: it is a torch\.fx\.GraphModule"):
        esper.grow(network, slots="middle.grown.0", example=IMAGES)


def test_the_lists_inside_fossils_are_no_layers_to_deepen():
    host = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(288, 3))
    network = harvested(grown(host, [("0", "conv_heavy", "linear")], IMAGES))
    with pytest.raises(HostError, match="lists with layers of one class in this Sequential: none"):
        esper.deepen(network, to=4)


# -- caches ----------------------------------------------------------------------------------------


def test_a_copy_that_is_no_layer_switches_caches_off_and_says_so():
    garden = decoder()
    with pytest.warns(UserWarning, match=r"have no cache, so .* Decoder says use_cache=False"):
        network = garden.harvest()
    assert (network.config.use_cache, garden.model.host.config.use_cache) == (False, True)
    assert torch.equal(network.eval()(TOKENS), garden.model(TOKENS))


@pytest.mark.parametrize("passes", ["by position", "by name"])
def test_a_copy_that_is_no_layer_refuses_a_cache(passes):
    network = harvested(decoder())
    ones = torch.ones_like(TOKENS)
    carrier = network.get_submodule(next(grafts_of(network)).removesuffix(".grown"))
    assert type(carrier) is Layer
    args, kwargs = (TOKENS, ones, Cache()), {}
    if passes == "by name":
        args, kwargs = args[:2], {"past_key_values": args[2]}
    network.layers[0](*args, **kwargs)
    with pytest.raises(AssertionError, match="has no cache; call with use_cache=False"):
        carrier(*args, **kwargs)
    with pytest.raises(AssertionError, match="has no cache; call with use_cache=False"):
        network(TOKENS, use_cache=True)


def test_a_copy_refuses_a_cache_under_a_name_that_its_layer_does_not_mention():
    network = Copy(Open()).plain(gets_call=True)
    call = {"mask": torch.ones_like(TOKENS), "use_cache": True}
    network(TOKENS, (TOKENS,), call)
    assert network.body.inner.last is None
    with pytest.raises(AssertionError, match="has no cache"):
        network(TOKENS, (TOKENS,), {**call, "past_key_values": Cache()})


@pytest.mark.parametrize("passes", ["by position", "by name"])
def test_a_copy_keeps_no_state_from_call_to_call(passes):
    garden = decoder()
    network = harvested(garden)
    ones = torch.ones_like(TOKENS)
    args, kwargs = (TOKENS, ones, None, True), {}
    if passes == "by name":
        args, kwargs = args[:2], {"use_cache": True}
    carrier = network.get_submodule(next(grafts_of(network)).removesuffix(".grown"))
    carrier(*args, **kwargs)
    garden.model.host.layers[1](*args, **kwargs)
    (plain,) = [part for part in carrier.grown.modules() if type(part) is Layer]
    grown_copies = [
        part.body for part in garden.model.slot("r0c0").fossils if hasattr(part, "names")
    ]
    assert [part.last for part in (plain, *grown_copies)] == [None, None, None]
    assert carrier.last is TOKENS


def test_an_export_of_such_a_copy_switches_caches_off_too(tmp_path):
    garden = decoder()
    folder = garden.export(tmp_path)
    scope = {"__name__": "grown", "__file__": str(folder / "grown.py")}
    exec((folder / "grown.py").read_text(), scope)
    network = scope["graft"](Decoder()).eval()
    assert network.config.use_cache is False
    assert torch.equal(network(TOKENS), garden.model(TOKENS))
    assert not [text for text in scope.values() if "esper" in getattr(text, "__module__", "")]


# -- proof -----------------------------------------------------------------------------------------


def test_plain_fossils_are_compared_where_no_batch_is_known(tmp_path, monkeypatch):
    folder = images().save(tmp_path / "saved")
    unseen = esper.load(folder, Images())
    assert unseen.model.sample is None
    harvested(unseen)
    monkeypatch.setattr(
        "esper.kasmina.seeds.Seed.plain", lambda seed, gets_call=False: nn.Identity()
    )
    with pytest.raises(HostError, match="the fossils of slot r0c0 differ"):
        unseen.harvest()
