"""The grown network as weights and a source file:

rebuilt where esper cannot be imported, and never broken code.
"""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import esper
from esper.kasmina import packing, plain, seeds, unseen
from esper.kasmina.blueprints import REGISTRY, blueprint
from esper.kasmina.copies import configuration, copying, counting, membership
from esper.leyline.errors import BlueprintError, HostError, SaveError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from kasmina.test_harvesting import GATED, LINEAR, TOKENS, Taken, grown, output
from user_models import CNN, Encoder, OneBuffer, made_up, random_images, random_vectors, script

IMAGES = random_images(16)
OFFSET = 2


# -- blueprints of users' own; their sources are what is exported ----------------------------------


def self_contained(channels):
    from torch.nn.functional import relu

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Conv2d(channels, channels, 1)

        def forward(self, features):
            return relu(self.mix(features)) ** 2

    return Squared()


def uses_a_global_when_built(channels):
    return nn.Conv2d(channels, channels, 1 + OFFSET, padding=1)


def uses_a_global_when_run(channels):
    class Shifted(nn.Module):
        def forward(self, features):
            return features + OFFSET

    return Shifted()


def conv(channels):
    """Has the name of something in esper's own sources, and means something else."""
    return nn.Conv2d(channels, channels, 1)


def uses_a_neighbour_with_a_taken_name(channels):
    return conv(channels)


class AsClass(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(channels, channels, 1)


@pytest.fixture
def register():
    """Enter a blueprint for one test."""
    names = []

    def enter(build, name="my_own"):
        blueprint("image", name)(build)
        names.append(name)
        return [name]

    yield enter
    for name in names:
        del REGISTRY._known["image", name]


def own_garden(blueprints):
    return grown(
        CNN(), ["layer1", "layer2"], IMAGES, [LINEAR], blueprints=blueprints, unfinished=False
    )


def rounds_otherwise(garden):
    """As a compiled fossil does."""
    (fossil,) = garden.model.slot("r0c0").fossils
    fossil._compiled_call_impl = lambda features: fossil._call_impl(features) * (1 + 1e-6)


def lies_otherwise(garden):
    garden.model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("change", [rounds_otherwise, lies_otherwise])
def test_fossils_that_run_compiled_or_channels_last_are_exported(change, tmp_path):
    garden = grown(
        CNN(width=16), ["layer1"], IMAGES, [LINEAR], blueprints=["conv_heavy"], unfinished=False
    )
    change(garden)
    (folder := tmp_path / "grown").mkdir()
    garden.export(folder)
    spec = importlib.util.spec_from_file_location("grown_otherwise", folder / "grown.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = output(garden.model, IMAGES)
    assert torch.allclose(
        output(module.graft(CNN(width=16)), IMAGES), expected, rtol=1e-4, atol=1e-5
    )


# -- rebuilding ------------------------------------------------------------------------------------

REBUILD = """
    import sys
    sys.modules["esper"] = None
    sys.path.insert(0, {here!r})
    import torch
    from torch import nn
    from safetensors.torch import load_file, save_file
    import grown
    {host}
    inputs = load_file({inputs!r})["inputs"]
    with torch.no_grad():
        save_file({{"outputs": grown.graft(host).eval()(inputs)}}, {outputs!r})
"""
PLAIN_CNN = """
class CNN(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, 3)

    def forward(self, images):
        return self.head(self.layer2(self.layer1(images)).mean((2, 3)))

host = CNN()
"""
PLAIN_ENCODER = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(tokens).mean(1))

host = Encoder()
"""


def rebuilt_elsewhere(folder, host, inputs):
    """What the exported network says in a process in which esper cannot be imported."""
    save_file({"inputs": inputs}, folder / "inputs.st")
    program = textwrap.dedent(REBUILD).format(
        here=str(folder),
        host=host,
        inputs=str(folder / "inputs.st"),
        outputs=str(folder / "outputs.st"),
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "outputs.st")["outputs"]


def test_a_cnn_is_rebuilt_to_the_bit_where_esper_cannot_be_imported(tmp_path):
    garden = grown(CNN(), ["layer1", "layer2"], IMAGES, [LINEAR, GATED])
    garden.export(tmp_path)
    assert torch.equal(
        rebuilt_elsewhere(tmp_path, PLAIN_CNN, IMAGES), output(garden.harvest(), IMAGES)
    )


@pytest.mark.slow
def test_a_transformer_is_rebuilt_to_the_bit_where_esper_cannot_be_imported(tmp_path):
    garden = grown(
        Encoder(True),
        ["encoder.layers.0", "encoder.layers.1"],
        TOKENS,
        [GATED],
        blueprints=["attention"],
    )
    garden.export(tmp_path)
    assert torch.equal(
        rebuilt_elsewhere(tmp_path, PLAIN_ENCODER, TOKENS), output(garden.harvest(), TOKENS)
    )


def test_the_exported_source_does_not_mention_esper_in_its_imports(tmp_path):
    source = (own_garden(["conv_light"]).export(tmp_path) / "grown.py").read_text()
    assert not [line for line in source.splitlines() if "import" in line and "esper" in line]


def graft_here(folder, host):
    spec = importlib.util.spec_from_file_location("grown_here", folder / "grown.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.graft(host)


@pytest.mark.parametrize("name", [name for name in REGISTRY.names("image") if "copy" not in name])
def test_every_image_blueprint_can_be_exported(tmp_path, name):
    garden = own_garden([name])
    garden.export(tmp_path)
    assert torch.equal(
        output(graft_here(tmp_path, CNN()), IMAGES), output(garden.harvest(), IMAGES)
    )


def test_a_network_without_fossils_is_exported_as_its_host(tmp_path):
    garden = grown(CNN(), ["layer1", "layer2"], IMAGES, [], unfinished=False)
    garden.export(tmp_path)
    assert torch.equal(output(graft_here(tmp_path, CNN()), IMAGES), output(garden.model, IMAGES))


def test_weights_that_are_parts_of_one_tensor_are_exported(tmp_path):
    vectors = random_vectors(4)
    garden = esper.grow(OneBuffer(), slots="enter", example=vectors, policy="never")
    expected = garden.model.eval()(vectors)
    host = graft_here(garden.export(tmp_path / "out"), OneBuffer())
    assert torch.equal(host.eval()(vectors), expected)


class Mixed(nn.Module):
    """Short weights first, long ones where it grows."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8, dtype=torch.bfloat16)
        self.middle, self.leave = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, vectors):
        return self.leave(self.middle(self.enter(vectors.bfloat16()).float()))


@pytest.mark.parametrize("blueprint_id", ["mlp", "copy"])
def test_no_weight_is_rounded_to_the_type_of_the_hosts_first_one(tmp_path, blueprint_id):
    inputs = random_vectors()
    garden = esper.grow(
        Mixed(), slots="middle", example=inputs, blueprints=[blueprint_id], policy="never"
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.model.build_in("r0c0", blueprint_id, "gated")
    for parameter in garden.model.slots.parameters():
        nn.init.normal_(parameter, std=0.3)
    garden.export(tmp_path)
    network = graft_here(tmp_path, Mixed())
    assert torch.equal(network(inputs), garden.model(inputs))


def test_a_sham_fossil_is_exported_as_nothing(tmp_path):
    garden = own_garden(["sham"])
    garden.export(tmp_path)
    assert torch.equal(
        output(graft_here(tmp_path, CNN()), IMAGES), output(garden.harvest(), IMAGES)
    )


# -- blueprints of one's own -----------------------------------------------------------------------


def test_a_self_contained_blueprint_is_exported_with_its_source(tmp_path, register):
    garden = own_garden(register(self_contained))
    garden.export(tmp_path)
    assert torch.equal(
        rebuilt_elsewhere(tmp_path, PLAIN_CNN, IMAGES), output(garden.harvest(), IMAGES)
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda channels: nn.Conv2d(channels, channels, 1),
        uses_a_global_when_built,
        uses_a_global_when_run,
        uses_a_neighbour_with_a_taken_name,
        AsClass,
        eval("lambda channels: nn.Conv2d(channels, channels, 1)"),
    ],
    ids=["lambda", "global when built", "global when run", "taken name", "class", "without source"],
)
def test_a_blueprint_that_cannot_stand_alone_is_refused_and_nothing_is_written(
    tmp_path, register, build
):
    garden = own_garden(register(build))
    with pytest.raises(BlueprintError, match=r"my_own|NameError|TypeError|slot r0c0"):
        garden.export(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_a_harvest_that_is_refused_writes_nothing(tmp_path):
    garden = grown(
        nn.Sequential(Taken(), nn.Linear(6, 3)), ["0", "1"], random_vectors(16), [LINEAR]
    )
    with pytest.raises(HostError):
        garden.export(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


# -- files that are there --------------------------------------------------------------------------


def test_an_export_replaces_an_older_one(tmp_path):
    own_garden(["attention"]).export(tmp_path)
    garden = own_garden(["norm"])
    garden.export(tmp_path)
    assert torch.equal(
        output(graft_here(tmp_path, CNN()), IMAGES), output(garden.harvest(), IMAGES)
    )


def put_tensors(path):
    save_file({"mine": torch.zeros(1)}, path)


@pytest.mark.parametrize("name", ["grown.py", "weights.safetensors"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, put_tensors], ids=lambda put: put.__name__)
def test_an_export_is_written_over_nothing_but_an_export(tmp_path, name, put):
    put(tmp_path / name)
    before = (tmp_path / name).stat()
    before = (before.st_ino, before.st_mtime_ns, before.st_size)
    with pytest.raises(SaveError, match=f"{name} is .* and stays as it is.*another path"):
        own_garden(["norm"]).export(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    after = (tmp_path / name).stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == before


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["it's", 'say "hi"', '"""', "a\\", "x'];import os;['", "naïve {table}", "new\nline"]
)
def test_a_modules_name_cannot_break_the_generated_code(tmp_path, name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Linear(6, 6))

        def forward(self, inputs):
            return self.get_submodule(name)(inputs)

    inputs = random_vectors(4)
    garden = esper.grow(
        Named(),
        slots=name,
        example=inputs,
        blueprints=["mlp"],
        policy=script({0: (1, 0, 1, 0), 3: (3, 0, 0, 0)}),
        settings=GrowthSettings(scale_at_birth=1.0, lengths=StageLengths()),
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    for _ in range(4):
        garden.step(made_up(garden))
    garden.export(tmp_path)
    assert torch.equal(
        output(graft_here(tmp_path, Named()), inputs), output(garden.harvest(), inputs)
    )
    assert not torch.equal(output(garden.harvest(), inputs), output(Named(), inputs))


def test_no_two_parts_of_an_exported_file_share_a_name():
    parts = [packing, plain, seeds, copying, configuration, counting, membership, unseen]
    names: list[str] = []
    for part in parts:
        for node in ast.parse(inspect.getsource(part)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names += [target.id for target in node.targets]
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == set()
