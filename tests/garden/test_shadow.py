"""TRAINING seeds in a loop of one's own:

they learn from `garden.shadow(closure)` only, and the host never notices.
"""

import pytest
import torch

from esper.leyline.lifecycle import StageLengths
from esper.telemetry.events import GateJudged
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, made_up, random_images, stage_of

IMAGES, HELD_OUT = random_images(96, seed=1), random_images(96, seed=2)
INCUBATED = StageLengths(training=2)


def incubated(with_shadow):
    """A garden one step before the end of its seed's incubation, the seed taught by shadow passes
    or not at all.
    """
    garden = grow_cnn({0: PLANT_FIRST}, lengths=INCUBATED, host=CNN(dropout=0.2))
    garden.step(made_up(garden))
    assert stage_of(garden) == "TRAINING"
    optimizer = garden.model.link.optimizer
    for epoch in range(2):
        garden.model.train()
        for rows in torch.randperm(
            len(IMAGES), generator=torch.Generator().manual_seed(epoch)
        ).split(16):
            optimizer.zero_grad()
            torch.manual_seed(int(rows[0]))
            losses_of(garden.model, IMAGES[rows]).mean().backward()
            if with_shadow:
                garden.shadow(lambda rows=rows: losses_of(garden.model, IMAGES[rows]).mean())
            optimizer.step()
        if epoch == 0:
            garden.step(lambda: losses_of(garden.model, HELD_OUT))
    return garden


def incubation_gate(garden):
    (gate,) = [
        event for event in garden.history if isinstance(event, GateJudged) and event.gate == "G2"
    ]
    return gate


def test_a_shadow_pass_teaches_the_seed():
    garden = grow_cnn({0: PLANT_FIRST}, lengths=INCUBATED)
    garden.step(made_up(garden))
    losses_of(garden.model.train(), IMAGES).mean().backward()
    seed = garden.model.slot("r0c0").seed
    assert seed.scale.grad is None
    garden.shadow(lambda: losses_of(garden.model, IMAGES).mean())
    assert seed.scale.grad.abs().sum() > 0


def test_a_shadow_pass_leaves_the_hosts_gradients_and_buffers_alone():
    garden = grow_cnn({0: PLANT_FIRST}, lengths=INCUBATED)
    garden.step(made_up(garden))
    host = garden.model.host
    losses_of(garden.model.train(), IMAGES).mean().backward()
    before = [p.grad.clone() for p in host.parameters()], [b.clone() for b in host.buffers()]
    garden.shadow(lambda: losses_of(garden.model, HELD_OUT).mean())
    assert all(torch.equal(p.grad, g) for p, g in zip(host.parameters(), before[0], strict=True))
    assert all(torch.equal(b, saved) for b, saved in zip(host.buffers(), before[1], strict=True))


def test_shadow_passes_do_not_change_how_the_host_trains():
    trained = []
    for with_shadow in (True, False):
        torch.manual_seed(0)
        trained.append(incubated(with_shadow).model.host.state_dict())
    taught, left = trained
    assert all(torch.equal(value, left[name]) for name, value in taught.items())


def test_a_seed_that_learned_in_the_shadow_is_blended_in():
    garden = incubated(with_shadow=True)
    garden.step(lambda: losses_of(garden.model, HELD_OUT))
    gate = incubation_gate(garden)
    assert (gate.verdict, stage_of(garden)) == ("passed", "BLENDING")
    assert gate.measured > 0


def test_a_seed_without_shadow_passes_is_still_the_identity_and_is_culled():
    garden = incubated(with_shadow=False)
    garden.step(lambda: losses_of(garden.model, HELD_OUT))
    gate = incubation_gate(garden)
    assert (gate.verdict, gate.measured, stage_of(garden)) == ("failed", 0.0, "CULLED")


def test_a_shadow_pass_without_incubating_seeds_calls_nothing():
    garden = grow_cnn()
    garden.shadow(lambda: pytest.fail("there is nobody to teach"))
    assert garden.model.shadow_passes == 0
