"""Loops as people have them, where a garden would be silently wrong:

states, rates, evaluations, harvests.
"""

import copy
import warnings

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import esper
from esper.leyline.errors import HostError, OptimizerError, SettingError
from esper.leyline.lifecycle import StageLengths
from esper.telemetry.events import FossilJudged, GrowthHint
from user_models import (
    CNN,
    MLP,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    random_vectors,
    script,
    train_epoch,
    walk_to,
)

IMAGES, HELD_OUT = random_images(64, seed=1), random_images(40, seed=2)


def play(garden, epochs=1, evaluate=None):
    for _ in range(epochs):
        train_epoch(garden.model, garden.model.link.optimizer, garden.epoch, IMAGES)
        garden.step(evaluate or (lambda: losses_of(garden.model, HELD_OUT)))
    return garden


def hints(garden):
    return [event.text for event in garden.history if isinstance(event, GrowthHint)]


# -- modules that training passes by ---------------------------------------------------------------


class Checkpointed(CNN):
    """Runs its first layer as a whole, its children one by one, or cut off from gradients."""

    way = "whole"

    def forward(self, images):
        layers = [self.layer1] if self.way != "children" else list(self.layer1)
        if self.training and self.way != "off":
            for layer in layers:
                images = checkpoint(layer, images, use_reentrant=self.way == "reentrant")
        else:
            images = self.layer1(images)
        return self.head(self.layer2(images).mean((2, 3)))


def train_once(garden):
    train_epoch(garden.model, garden.model.link.optimizer, garden.epoch, IMAGES)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", ["children", "reentrant"])
def test_what_grew_where_training_does_not_come_is_refused(way):
    garden = grow_cnn({0: PLANT_FIRST}, host=Checkpointed())
    play(garden)
    garden.model.host.way = way
    train_once(garden)
    before = garden.epoch, garden.model.slot("r0c0").state
    with pytest.raises(HostError, match=r"slot r0c0 sits on 'layer1', which no training pass"):
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    assert (garden.epoch, garden.model.slot("r0c0").state) == before
    garden.model.host.way = "whole"
    play(garden, 2)
    assert garden.epoch == 3


class Skipping(CNN):
    """Skips its first layer by chance, in training."""

    kept_part = 0.0

    def forward(self, images):
        is_kept = not self.training or bool(torch.rand(()) < self.kept_part)
        images = self.layer1(images) if is_kept else images.repeat(1, 4, 1, 1)
        return self.head(self.layer2(images).mean((2, 3)))


def test_a_layer_that_training_has_skipped_by_chance_is_not_refused():
    garden = grow_cnn({0: PLANT_FIRST}, host=Skipping())
    play(garden)
    train_once(garden)
    with pytest.raises(HostError, match=r"slot r0c0 sits on 'layer1', which no training pass"):
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    garden.model.host.kept_part = 0.3
    modes = [module.training for module in garden.model.modules()]
    random_state = torch.get_rng_state()
    evaluate = lambda: losses_of(garden.model, HELD_OUT)  # noqa: E731
    assert garden.model.slot("r0c0").passes == 0
    garden.step(evaluate)
    assert garden.epoch == 2
    assert [module.training for module in garden.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)


def test_what_is_planted_or_loaded_after_training_is_not_refused(tmp_path):
    garden = grow_cnn()
    train_once(garden)
    garden.plant("r0c0", "conv_light")
    garden.save(tmp_path)
    garden.step(lambda: losses_of(garden.model, HELD_OUT))
    loaded = esper.load(tmp_path, CNN(), policy=script({}))
    loaded.attach(optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    loaded.step(lambda: losses_of(loaded.model, HELD_OUT))
    assert loaded.epoch == garden.epoch == 1


# -- load_state_dict -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["BLENDING", "DORMANT"], ids=["live", "kept"])
def test_a_state_with_seeds_does_not_fit_a_network_without_them(stage):
    grown = walk_to(play(grow_cnn({0: PLANT_FIRST})), stage)
    for state, fresh in (
        (grown.model.state_dict(), grow_cnn().model),
        (grown.model.host.state_dict(), CNN()),
    ):
        with pytest.raises(RuntimeError, match=r"layer1.*conv_light.*garden\.save.*esper\.load"):
            fresh.load_state_dict(state)


def test_a_state_fits_the_network_it_is_of():
    garden = play(grow_cnn({0: PLANT_FIRST}), epochs=2)
    state = copy.deepcopy(garden.model.state_dict())
    train_epoch(garden.model, garden.model.link.optimizer, 0, IMAGES)
    garden.model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in garden.model.state_dict().items())


def test_weights_of_an_earlier_epoch_do_not_move_a_seeds_share():
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(ramp=4)), "BLENDING")
    garden.step(made_up(garden))
    slot = garden.model.slot("r0c0")
    assert slot.state.alpha < 1.0
    weights = copy.deepcopy(garden.model.state_dict())
    walk_to(garden, "PROBATIONARY")
    garden.model.load_state_dict(weights)
    assert float(slot.alpha) == slot.state.alpha == 1.0
    assert not [name for name in weights if name.endswith("alpha")]


def test_the_bare_hosts_state_cannot_bring_a_grown_network_back():
    garden = walk_to(play(grow_cnn({0: PLANT_FIRST})), "DORMANT")
    with pytest.raises(RuntimeError, match=r"layer1.*garden\.save"):
        garden.model.host.load_state_dict(copy.deepcopy(garden.model.host.state_dict()))


def test_what_is_harvested_has_an_ordinary_state():
    plain = walk_to(grow_cnn({0: PLANT_FIRST}), "DORMANT").harvest()
    assert not any("esper" in name for name in plain.state_dict())
    assert not any(
        module._load_state_dict_pre_hooks or module._state_dict_hooks for module in plain.modules()
    )


# -- rates and optimisers --------------------------------------------------------------------------


def test_seeds_follow_a_rate_that_is_set_by_hand():
    """Only the host's own group is set, as every hand-written warm-up does."""
    garden = grow_cnn({0: PLANT_FIRST}, attach=False)
    optimizer = optim.SGD(garden.parameters(), lr=0.1, momentum=0.9)
    garden.attach(optimizer, seed_lr=0.5)
    play(garden)
    used = []
    optimizer.register_step_pre_hook(
        lambda *_: used.append([(g["lr"], g["momentum"]) for g in optimizer.param_groups])
    )
    optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"] = 0.02, 0.5
    play(garden)
    assert used[0] == [(0.02, 0.5), (0.01, 0.5), (0.01, 0.5)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02] * 3


def grow_mlp(**options):
    garden = esper.grow(
        MLP(),
        slots=["enter", "middle"],
        example=random_vectors(2),
        blueprints=["mlp", "copy"],
        policy=script({0: PLANT_FIRST, 1: (1, 1, 2, 0)}),
        max_seeds=3,
        **options,
    )
    matrices = [p for p in garden.parameters() if p.dim() == 2]
    vectors = [p for p in garden.parameters() if p.dim() == 1]
    return garden, optim.Muon(matrices, lr=0.02), optim.AdamW(vectors, lr=0.01)


def learn_vectors(garden, optimizers, epochs):
    vectors = random_vectors(64, seed=1)
    for _ in range(epochs):
        for rows in vectors.split(16):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses_of(garden.model, rows).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        garden.step(lambda: losses_of(garden.model, vectors))


def shape_counts(optimizer):
    return sorted({p.dim() for group in optimizer.param_groups for p in group["params"]})


def test_two_optimisers_share_the_seeds_as_they_share_the_host(tmp_path):
    garden, muon, adam = grow_mlp()
    garden.attach([muon, adam])
    learn_vectors(garden, [muon, adam], 2)
    seeds = [p for slot in garden.model.slots.values() for p in slot.parameters()]
    before = [p.detach().clone() for p in seeds]
    learn_vectors(garden, [muon, adam], 3)
    assert all(not torch.equal(p, old) for p, old in zip(seeds, before, strict=True))
    assert (shape_counts(muon), shape_counts(adam)) == ([2], [1])
    assert garden.model.fossilized_seeds == 2
    garden.save(tmp_path)

    fresh, again = MLP(), None
    again = esper.load(tmp_path, fresh, policy=script({}))
    pair = [optim.Muon([p for p in again.parameters() if p.dim() == 2], lr=0.02)]
    pair.append(optim.AdamW([p for p in again.parameters() if p.dim() == 1], lr=0.01))
    again.attach(pair)
    learn_vectors(garden, [muon, adam], 1)
    learn_vectors(again, pair, 1)
    assert all(
        torch.equal(p, q) for p, q in zip(garden.parameters(), again.parameters(), strict=True)
    )


def test_each_of_several_optimisers_may_have_its_scheduler():
    garden, muon, adam = grow_mlp()
    plans = [optim.lr_scheduler.StepLR(adam, 1, 0.5), optim.lr_scheduler.StepLR(muon, 1, 0.1)]
    garden.attach([muon, adam], plans, seed_lr=2.0)
    learn_vectors(garden, [muon, adam], 1)
    for plan in plans:
        plan.step()
    learn_vectors(garden, [muon, adam], 1)
    assert {group["lr"] for group in muon.param_groups} == {0.02 * 0.1}
    assert {group["lr"] for group in adam.param_groups} == {0.005}
    assert garden.model.link.has_rate_fallen


def test_optimisers_that_do_not_fit_together_are_refused_and_left_alone():
    garden, muon, adam = grow_mlp()
    for wrong in ([muon], [muon, adam, optim.SGD(adam.param_groups[0]["params"], lr=0.1)], []):
        with pytest.raises(OptimizerError):
            garden.attach(wrong)
    assert [len(each.param_groups) for each in (muon, adam)] == [1, 1]
    garden.attach([muon, adam])
    groups = len(adam.param_groups)
    with pytest.raises(OptimizerError, match="once"):
        garden.attach([adam, muon])
    assert len(adam.param_groups) == groups


# -- evaluations, steps, harvests ------------------------------------------------------------------


def shuffled(garden):
    generator = torch.Generator().manual_seed(3)

    def evaluate():
        return losses_of(garden.model, HELD_OUT[torch.randperm(len(HELD_OUT), generator=generator)])

    return evaluate


def drawn(garden):
    generator = torch.Generator().manual_seed(3)
    return lambda: losses_of(garden.model, torch.randn(40, 1, 6, 6, generator=generator))


@pytest.mark.parametrize(("build", "word"), [(shuffled, "order"), (drawn, "other values")])
@pytest.mark.parametrize("ramp", [1, 0], ids=["live", "pruned"])
def test_an_evaluation_that_does_not_repeat_itself_gives_a_hint(ramp, build, word):
    garden = grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(ramp=ramp))
    play(garden, 3, build(garden))
    garden.prune(build(garden))
    assert any("evaluate()" in text and word in text for text in hints(garden))


def test_a_sound_evaluation_gives_no_hint_and_costs_no_more():
    garden, calls = grow_cnn({0: PLANT_FIRST}), []

    def evaluate():
        calls.append(garden.epoch)
        return losses_of(garden.model, HELD_OUT)

    play(garden, 4, evaluate)
    assert hints(garden) == []
    assert calls == [0, 1, 2, 2, 3]


def test_a_second_step_without_training_gives_a_hint():
    garden = play(grow_cnn())
    assert hints(garden) == []
    garden.step(made_up(garden))
    (hint,) = hints(garden)
    assert "took no step" in hint


def test_a_harvest_without_live_seeds_names_them(tmp_path):
    garden = play(grow_cnn({0: PLANT_FIRST}))
    for take in (garden.harvest, garden.harvest, lambda: garden.export(tmp_path)):
        with pytest.warns(UserWarning, match="conv_light in r0c0"):
            take()
    assert [text for text in hints(garden) if "conv_light in r0c0" in text] == hints(garden)
    assert len(hints(garden)) == 1


def test_a_harvest_of_all_there_is_warns_of_nothing():
    garden = play(grow_cnn({0: PLANT_FIRST}, epochs=5), 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        garden.harvest()


@pytest.mark.parametrize(("least", "is_kept"), [(0.0, True), (1e-4, False)])
def test_a_fossil_is_kept_for_more_than_the_least_gain_and_doubt_is_told(least, is_kept):
    settings = esper.GrowthSettings(lengths=StageLengths(ramp=0), least_gain=least)
    garden = esper.grow(
        CNN(),
        slots="layer1",
        example=IMAGES[:2],
        policy=script({0: PLANT_FIRST}),
        settings=settings,
    )
    garden.attach(optim.SGD(garden.parameters(), lr=0.1))
    play(garden)
    noise = torch.linspace(-1.0, 1.0, 100) * 4.5e-4

    def evaluate():
        """A contribution of 4.5e-5 ± 2.6e-5."""
        slot = garden.model.slot("r0c0")
        return torch.linspace(1.0, 2.0, 100).double() + (
            len(slot.left_out) or not len(slot.fossils)
        ) * (noise + 4.5e-5)

    events = garden.prune(evaluate)
    (judged,) = [event for event in events if isinstance(event, FossilJudged)]
    assert judged.is_kept is is_kept
    assert judged.contribution == pytest.approx(4.5e-5)
    assert [event for event in events if isinstance(event, GrowthHint)] == events[1:]
    assert ["least_gain" in text for text in hints(garden)] == [True] * is_kept


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_a_least_gain_without_meaning_is_refused(wrong):
    with pytest.raises(SettingError, match="least_gain"):
        esper.GrowthSettings(least_gain=wrong)


# -- optimisers on resume --------------------------------------------------------------------------


def test_groups_in_another_order_are_refused_on_resume(tmp_path):
    def build(model, order):
        groups = [{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.zeros(2))]}]
        return optim.AdamW(groups[::order], lr=1e-2)

    garden = grow_cnn(attach=False)
    garden.attach(build(garden, 1))
    garden.save(tmp_path / "run")
    resumed = esper.load(tmp_path / "run", CNN(), policy=script({}))
    with pytest.raises(OptimizerError, match=r"2 like 0, .* got .* 2 like 1, .*same order"):
        resumed.attach(build(resumed, -1))
    resumed.attach(build(resumed, 1))


def test_what_grew_does_not_make_another_group_the_hosts():
    garden = grow_cnn()
    garden.model.max_seeds = None
    for _ in range(12):
        garden.model.build_in("r0c0", "conv_light")
    grown = [p for name, p in garden.model.named_parameters() if name.startswith("slots.")]
    host = list(garden.model.host.parameters())
    assert sum(p.numel() for p in grown) > sum(p.numel() for p in host)
    garden.attach(optim.SGD([{"params": grown, "lr": 1e-4}, {"params": host, "lr": 1e-1}]))
    assert garden.model.link.home == 1


def test_an_optimiser_that_keeps_a_partition_of_its_own_is_refused():
    garden = grow_cnn()
    kind = type("ZeroRedundancyOptimizer", (optim.SGD,), {})
    with pytest.raises(OptimizerError, match="ZeroRedundancyOptimizer"):
        garden.attach(kind(garden.parameters(), lr=0.1))


def test_data_parallel_is_refused_before_growing():
    with pytest.raises(esper.EsperError, match=r"DataParallel.*garden\.model"):
        esper.grow(nn.DataParallel(CNN()), slots="module.layer1", example=IMAGES[:2])
