"""Growing under torch.compile, autocast, copies, state dicts and gradient checkpointing."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import esper
from esper.leyline.lifecycle import StageLengths
from user_models import (
    CULL_FIRST,
    KEEP_FIRST,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    stage_of,
    train_epoch,
    walk_to,
)

IMAGES = random_images(16)
SLOW_RAMP = StageLengths(ramp=4)


class CompiledGarden:
    """A compiled garden that counts how often its graph was built."""

    def __init__(self, choices, **options):
        torch._dynamo.reset()
        self.builds = 0
        self.garden = grow_cnn(choices, scale=1.0, **options)
        self.compiled = torch.compile(self.garden.model, backend=self._build, fullgraph=True)

    def _build(self, graph, inputs):
        self.builds += 1
        return graph.forward

    @torch.no_grad()
    def run(self):
        self.garden.model.eval()
        return self.compiled(IMAGES)

    def builds_of(self, change):
        """Graphs built because of a change, and that the output is still the uncompiled one's."""
        self.run()
        before = self.builds
        change()
        compiled = self.run()
        with torch.no_grad():
            assert torch.allclose(compiled, self.garden.model(IMAGES), atol=1e-6)
        return self.builds - before

    def step(self):
        return self.garden.step(made_up(self.garden))


def test_an_ungrown_network_compiles_to_one_graph():
    subject = CompiledGarden({})
    subject.run()
    subject.step()
    subject.run()
    assert subject.builds == 1


def test_planting_builds_a_new_graph():
    subject = CompiledGarden({0: PLANT_FIRST})
    assert subject.builds_of(subject.step) == 1


def test_a_ramp_from_its_first_step_to_its_last_builds_no_graph():
    subject = CompiledGarden({0: PLANT_FIRST}, lengths=SLOW_RAMP)
    subject.step()
    alphas = []
    for _ in range(3):
        assert subject.builds_of(subject.step) == 0
        alphas.append(float(subject.garden.model.slot("r0c0").alpha))
    assert alphas == [0.5, 0.75, 1.0]


def test_probation_builds_no_graph():
    subject = CompiledGarden({0: PLANT_FIRST}, lengths=SLOW_RAMP)
    walk_to(subject.garden, "BLENDING")

    def until_probation():
        walk_to(subject.garden, "PROBATIONARY")

    assert subject.builds_of(until_probation) == 0


def test_measuring_with_a_slot_off_builds_no_graph():
    subject = CompiledGarden({0: PLANT_FIRST})
    walk_to(subject.garden, "PROBATIONARY")
    with_seed = subject.run()
    before = subject.builds
    with subject.garden.model.slot_off("r0c0"):
        without = subject.run()
    assert subject.builds == before
    assert not torch.equal(with_seed, without)


def test_fossilizing_builds_a_new_graph():
    subject = CompiledGarden({0: PLANT_FIRST, 3: KEEP_FIRST})
    walk_to(subject.garden, "PROBATIONARY")

    def keep():
        while not subject.garden.model.fossilized_seeds:
            subject.step()

    assert subject.builds_of(keep) == 1


@pytest.mark.slow
def test_culling_goes_back_to_the_graph_without_the_seed():
    subject = CompiledGarden({0: PLANT_FIRST, 3: CULL_FIRST}, keeps=False)
    bare = subject.run()
    walk_to(subject.garden, "PROBATIONARY")
    subject.run()
    while subject.garden.model.active_seeds:
        subject.step()
    assert torch.equal(subject.run(), bare)


@pytest.mark.slow
def test_a_compiled_network_follows_a_fossil_that_is_off_and_one_that_is_removed():
    subject = CompiledGarden(
        {0: PLANT_FIRST, 1: (1, 0, 2, 0)}, lengths=StageLengths(ramp=0), max_seeds=2
    )
    bare = subject.run()
    subject.step()
    subject.step()
    model, whole = subject.garden.model, subject.run()
    for number in (0, 1):
        with model.fossil_off("r0c0", number):
            compiled = subject.run()
            with torch.no_grad():
                assert torch.allclose(compiled, model(IMAGES), atol=1e-6)
        assert not torch.equal(compiled, whole)
        assert torch.equal(subject.run(), whole)
    for _ in range(2):
        model.remove_fossil("r0c0", 0)
    assert torch.equal(subject.run(), bare)


def test_a_compiled_network_trains_its_seed():
    subject = CompiledGarden({0: PLANT_FIRST})
    walk_to(subject.garden, "BLENDING")
    subject.garden.model.train()
    losses_of(subject.compiled, IMAGES).mean().backward()
    assert subject.garden.model.slot("r0c0").seed.scale.grad.abs().sum() > 0


# -- autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend", [0, 2], ids=["linear", "gated"])
def test_a_blending_seed_trains_under_autocast(blend):
    garden = grow_cnn({0: (1, 0, 1, blend)}, lengths=SLOW_RAMP)
    walk_to(garden, "BLENDING")
    before = garden.model.slot("r0c0").seed.scale.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses_of(garden.model.train(), IMAGES).mean()
    loss.backward()
    garden.model.link.optimizer.step()
    assert loss.isfinite()
    assert not torch.equal(garden.model.slot("r0c0").seed.scale, before)


def test_a_slot_keeps_the_type_that_autocast_gave_its_features():
    garden = walk_to(grow_cnn({0: PLANT_FIRST}), "BLENDING")
    features = torch.randn(2, 4, 6, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert garden.model.slot("r0c0")(features).dtype is torch.bfloat16


# -- copies ----------------------------------------------------------------------------------------


def blending_garden():
    return walk_to(grow_cnn({0: PLANT_FIRST}, lengths=SLOW_RAMP, scale=1.0), "BLENDING")


def test_a_copy_computes_the_same():
    garden = blending_garden()
    twin = copy.deepcopy(garden.model)
    assert torch.equal(twin.eval()(IMAGES), garden.model.eval()(IMAGES))


def test_training_a_copy_does_not_touch_the_original():
    garden = blending_garden()
    before = {name: value.clone() for name, value in garden.model.state_dict().items()}
    twin = copy.deepcopy(garden.model)
    train_epoch(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 0, IMAGES)
    assert all(
        torch.equal(value, before[name]) for name, value in garden.model.state_dict().items()
    )
    assert not torch.equal(twin.slot("r0c0").seed.scale, before["slots.r0c0.seed.scale"])


def test_a_copys_hooks_call_its_own_slots():
    twin = copy.deepcopy(blending_garden().model)
    before = twin.eval()(IMAGES)
    with twin.slot_off("r0c0"):
        assert not torch.equal(twin(IMAGES), before)


def test_a_copy_has_no_optimizer():
    garden = blending_garden()
    assert copy.deepcopy(garden.model).link is None
    assert garden.model.link is not None


def test_a_state_dict_goes_into_a_network_of_the_same_structure():
    garden = blending_garden()
    train_epoch(garden.model, garden.model.link.optimizer, 0, IMAGES)
    other = blending_garden()
    assert not torch.equal(other.model.eval()(IMAGES), garden.model.eval()(IMAGES))
    other.model.load_state_dict(garden.model.state_dict())
    assert torch.equal(other.model.eval()(IMAGES), garden.model.eval()(IMAGES))


def test_the_bare_models_weights_load_into_the_wrapped_host():
    garden = grow_cnn()
    bare = type(garden.model.host)()
    garden.model.host.load_state_dict(bare.state_dict())
    assert torch.equal(garden.model.eval()(IMAGES), bare.eval()(IMAGES))


# -- gradient checkpointing ------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes each layer in the backward pass, if asked."""

    def __init__(self):
        super().__init__()
        self.saves_memory = False
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = (
                checkpoint(layer, inputs, use_reentrant=False)
                if self.saves_memory
                else layer(inputs)
            )
        return self.head(inputs)


def checkpointed_gradients(saves_memory):
    torch.manual_seed(0)
    inputs = torch.randn(16, 6)
    garden = esper.grow(Checkpointed(), slots="layers.*", example=inputs, policy="schedule")
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    while not any(stage_of(garden, f"r0c{i}") == "BLENDING" for i in range(3)):
        garden.step(made_up(garden))
    garden.model.host.saves_memory = saves_memory
    torch.manual_seed(1)
    losses_of(garden.model.train(), inputs).mean().backward()
    return {name: p.grad for name, p in garden.model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_on_a_layer_with_a_slot_gives_the_same_gradients():
    plain, saving = checkpointed_gradients(False), checkpointed_gradients(True)
    assert any(name.startswith("slots.") for name in plain)
    assert plain.keys() == saving.keys()
    assert all(torch.equal(gradient, saving[name]) for name, gradient in plain.items())


def test_a_compiled_network_follows_the_ramp_of_a_copy_without_being_built_again():
    torch._dynamo.reset()
    builds = []

    def backend(graph, inputs):
        builds.append(graph)
        return graph.forward

    torch.manual_seed(0)
    net, features = (
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
        torch.randn(5, 4),
    )
    settings = esper.GrowthSettings(lengths=SLOW_RAMP)
    garden = esper.grow(
        net, slots="1", example=features, blueprints=["copy"], policy="never", settings=settings
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    compiled = torch.compile(garden.model, backend=backend, fullgraph=True)
    garden.model.germinate_seed("r0c0", "copy")
    outputs = []
    for _ in range(3):
        garden.model.tick()
        with torch.no_grad():
            outputs.append(compiled(features))
            assert torch.allclose(outputs[-1], garden.model(features), atol=1e-6)
    assert len(builds) == 1
    assert not torch.equal(outputs[0], outputs[-1])


# -- more structures than torch compiles -----------------------------------------------------------


def grow_often(structures):
    """Train and grow once per structure; for each, how many graphs were built, and how often one
    ran.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs, builds, runs = torch.randn(16, 6), [], []

    def backend(graph, example):
        builds.append(graph)
        return lambda *args: (runs.append(graph), graph.forward(*args))[1]

    policy = "schedule:epochs=" + "+".join(map(str, range(structures)))
    settings = esper.GrowthSettings(lengths=StageLengths(ramp=0), scale_at_birth=0.5)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    garden = esper.grow(
        net,
        slots=["0"],
        example=inputs,
        blueprints=["lora"],
        budget=90.0,
        policy=policy,
        settings=settings,
    )
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.05)
    garden.attach(optimizer)
    call, found = torch.compile(garden.model, backend=backend), []
    for _ in range(structures):
        before = len(builds), len(runs)
        output = call(inputs)
        found.append((len(builds) - before[0], len(runs) - before[1]))
        assert torch.allclose(
            output, copy.deepcopy(garden.model)(inputs), atol=1e-6
        )  # which is not compiled
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        garden.step(lambda: losses_of(garden.model, inputs))
    assert garden.model.fossilized_seeds == structures
    return found


@pytest.mark.parametrize(
    ("limit", "structures"), [(2, 4), pytest.param(8, 10, marks=pytest.mark.slow)]
)
def test_a_compiled_model_is_still_compiled_after_more_structures_than_torch_compiles(
    limit, structures
):
    """One graph for every structure, and it is what runs."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=limit):
        assert grow_often(structures) == [(1, 1)] * structures
