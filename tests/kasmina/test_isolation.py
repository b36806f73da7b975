"""A TRAINING seed learns in shadow passes, and the host cannot tell that it is there."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import REGISTRY
from esper.leyline.lifecycle import StageLengths
from esper.leyline.stages import SeedStage
from kasmina.gardens import grow_cnn, images, loss_of, noisy_host, output

STEPS, CLIP = 5, 0.05
LONG = StageLengths(training=50)


@dataclass
class Trace:
    """What a host did over a few steps of training."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    random_state: Tensor | None = None
    host: nn.Module | None = None

    def note(self, host: nn.Module, output: Tensor) -> None:
        self.outputs.append(output.detach().clone())
        self.gradients.extend(parameter.grad.clone() for parameter in host.parameters())


def train_alone(host):
    """The reference: plain PyTorch, no slots anywhere."""
    trace = Trace(host=host)
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(host, images(seed=step)).backward()
        nn.utils.clip_grad_norm_(host.parameters(), CLIP)
        trace.note(host, output(host, images(seed=step)))
        optimizer.step()
    trace.random_state = torch.get_rng_state()
    return trace


def train_with_seeds(host, blueprint, blend):
    """The same, with a TRAINING seed in both slots that learns from a shadow pass in every step."""
    model = grow_cnn(host, lengths=LONG)
    trace = Trace(host=host)
    optimizer = model.link.optimizer
    torch.manual_seed(7)
    for slot_id in model.slot_config.slot_ids:
        model.germinate_seed(slot_id, blueprint, blend)
    model.tick()
    born = copy.deepcopy(model.slots)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, images(seed=step)).backward()
        with model.shadow():
            loss_of(model, images(seed=step)).backward()
        model.clip_gradients(CLIP)
        trace.note(host, output(model, images(seed=step)))
        optimizer.step()
    trace.random_state = torch.get_rng_state()
    return trace, model, born


@pytest.fixture(scope="module")
def alone():
    torch.manual_seed(3)
    return train_alone(noisy_host())


@pytest.fixture(
    scope="module",
    params=[("conv_light", "linear"), ("attention", "gated")],
    ids=lambda each: each[0],
)
def grown(request):
    torch.manual_seed(3)
    return train_with_seeds(noisy_host(), *request.param)


def is_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_seed_is_in_its_training_stage_throughout(grown):
    _, model, _ = grown
    assert {report.stage for report in model.get_slot_reports().values()} == {SeedStage.TRAINING}


def test_the_clipping_of_this_comparison_is_active(alone):
    first = alone.gradients[: len(list(alone.host.parameters()))]
    assert torch.nn.utils.get_total_norm(first) == pytest.approx(CLIP, rel=1e-3)


def test_outputs_are_bit_identical_to_a_run_without_the_seed(alone, grown):
    assert is_equal(alone.outputs, grown[0].outputs)


def test_host_gradients_are_bit_identical_to_a_run_without_the_seed(alone, grown):
    assert is_equal(alone.gradients, grown[0].gradients)


def test_host_weights_are_bit_identical_to_a_run_without_the_seed(alone, grown):
    assert is_equal(alone.host.parameters(), grown[0].host.parameters())


def test_shadow_passes_leave_the_batch_norm_buffers_alone(alone, grown):
    assert is_equal(alone.host.buffers(), grown[0].host.buffers())


def test_shadow_passes_leave_the_global_random_state_alone(alone, grown):
    assert torch.equal(alone.random_state, grown[0].random_state)


def test_the_seed_learns_all_the_same(grown):
    _, model, born = grown
    for slot_id, before in born.items():
        after = dict(model.slot(slot_id).seed.named_parameters())
        assert all(
            not torch.equal(value, after[name]) for name, value in before.seed.named_parameters()
        )


# -- one shadow pass -------------------------------------------------------------------------------


@pytest.fixture
def model():
    model = grow_cnn(noisy_host(), lengths=LONG, lr=0.5)
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    return model


def shadow_step(model):
    optimizer = model.link.optimizer
    optimizer.zero_grad()
    with model.shadow():
        loss = loss_of(model, images())
        loss.backward()
    optimizer.step()
    return loss.item()


def test_a_shadow_pass_gives_gradients_to_the_seed_alone(model):
    shadow_step(model)
    assert all(parameter.grad is None for parameter in model.host.parameters())
    assert model.slot("r0c0").seed.scale.grad.abs().sum() > 0


def test_a_shadow_pass_changes_the_seeds_output_and_nothing_else(model):
    features = torch.randn(2, 4, 8, 8)
    before = output(model, images())
    shadow_step(model)
    assert torch.equal(output(model, images()), before)
    assert not torch.equal(model.slot("r0c0").seed(features), features)


def test_shadow_passes_lower_the_loss_with_the_seed_at_full_strength():
    model = grow_cnn(lengths=LONG, lr=0.05)
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    with torch.no_grad(), model.at_full_strength("r0c0"):
        before = loss_of(model.eval(), images()).item()
    for _ in range(30):
        shadow_step(model.eval())
    with torch.no_grad(), model.at_full_strength("r0c0"):
        assert loss_of(model, images()).item() < before


def test_the_host_is_trainable_again_after_a_shadow_pass(model):
    shadow_step(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_the_user_froze_stays_frozen_after_a_shadow_pass(model):
    model.host.head[-1].weight.requires_grad_(False)
    shadow_step(model)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "host.head.2.weight"
    ]


def test_a_failing_shadow_pass_leaves_the_model_as_before(model):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(IndexError), model.shadow():
        loss_of(model, images())[9].backward()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.slot("r0c0").is_shadowed
    assert torch.equal(torch.get_rng_state(), state)


def test_two_shadow_passes_draw_different_dropout(model):
    with model.shadow():
        first = model(images())
    with model.shadow():
        second = model(images())
    assert not torch.equal(first, second)


def test_the_same_model_shadows_the_same_way_whatever_the_global_seed(model):
    losses = []
    for seed in (1, 2):
        twin = copy.deepcopy(model)
        torch.manual_seed(seed)
        with twin.shadow():
            losses.append(loss_of(twin, images()).item())
    assert losses[0] == losses[1]


def test_a_blending_seed_is_frozen_in_the_shadow_pass_of_another():
    model = grow_cnn(noisy_host(), lengths=LONG)
    model.germinate_seed("r0c0", "conv_light")
    model.germinate_seed("r0c1", "conv_light")
    model.tick()
    blending = model.slot("r0c1")
    blending.assign(blending.state.advance(SeedStage.BLENDING))
    with model.shadow():
        loss_of(model, images()).backward()
    assert model.slot("r0c0").seed.scale.grad is not None
    assert blending.seed.scale.grad is None


class MovingAverage(nn.Module):
    """A layer that replaces its buffer instead of writing into it, as many users' layers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, features):
        self.average = 0.9 * self.average + 0.1 * features.detach().mean()
        return features - self.average


def test_a_shadow_pass_restores_buffers_that_a_layer_replaces():
    host = noisy_host()
    host.blocks[1].append(MovingAverage())
    model = grow_cnn(host, lengths=LONG)
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    before = host.blocks[1][-1].average.clone()
    shadow_step(model)
    assert torch.equal(host.blocks[1][-1].average, before)


def test_every_image_blueprint_wakes_in_shadow_passes():
    for name in REGISTRY.names("image"):
        if REGISTRY.get("image", name).inherits:
            continue  # the blocks of this host have no equal shapes
        model = grow_cnn(noisy_host(), lengths=LONG)
        model.germinate_seed("r0c0", name)
        model.tick()
        shadow_step(model)
        assert model.slot("r0c0").seed.scale.abs().sum() > 0, name


def test_a_seeds_large_gradient_does_not_shrink_the_hosts():
    model = grow_cnn(noisy_host())
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    model.slot("r0c0").seed.scale.grad.fill_(1e6)
    model.clip_gradients(1.0)
    assert all(bool((p.grad == 1e-6).all()) for p in model.host.parameters())
    assert model.slot("r0c0").seed.scale.grad.norm() == pytest.approx(1.0, rel=1e-3)
