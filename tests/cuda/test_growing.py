"""The growing network on a GPU; skipped where there is none."""

import pytest
import torch

from esper.kasmina.hosts import build_cnn_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.leyline.stages import SeedStage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(lengths: StageLengths | None = None) -> tuple[MorphogeneticModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    settings = GrowthSettings(lengths=lengths or StageLengths())
    model = MorphogeneticModel(build_cnn_host().cuda(), settings=settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    model.attach(optimizer)
    return model, optimizer


def train(
    model: MorphogeneticModel, optimizer: torch.optim.Optimizer, steps: int = 3
) -> torch.Tensor:
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
    return images


def test_a_seed_has_its_whole_episode_on_the_device():
    model, optimizer = build()
    train(model, optimizer)
    model.germinate_seed("r0c1", "conv_light", "gated")
    assert all(parameter.is_cuda for parameter in model.parameters())
    for _ in range(2):
        model.tick()
        images = train(model, optimizer)
    with torch.no_grad():
        model.record_counterfactual(
            "r0c1", model(images).square().mean(1), model(images).square().mean(1) + 1
        )
        model.eval()
        before = model(images)
        model.fossilize_seed("r0c1")
        assert torch.equal(model(images), before)
    assert model.slot("r0c1").state.stage is SeedStage.FOSSILIZED


def test_incubation_leaves_host_and_its_gradients_bit_identical():
    torch.backends.cudnn.deterministic = True
    results = []
    for with_seed in (False, True):
        model, optimizer = build(StageLengths(training=5))
        if with_seed:
            model.germinate_seed("r0c1", "conv_light")
            model.tick()
        images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(4):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            if with_seed:
                with model.shadow():
                    model(images).square().mean().backward()
            optimizer.step()
        results.append({name: value.clone() for name, value in model.host.state_dict().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_every_blueprint_learns_under_bf16():
    for name in (
        "conv_light",
        "conv_heavy",
        "depthwise",
        "attention",
        "norm",
        "bottleneck",
        "inverted_bottleneck",
    ):
        model, optimizer = build()
        model.germinate_seed("r0c2", name, "gated")
        model.tick()
        images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(images).float().square().mean()
            loss.backward()
            optimizer.step()
        for parameter in model.slot("r0c2").seed.parameters():
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name
