"""Saving a garden and going on later:

the same run to the bit, whatever the optimiser and wherever it stopped.
"""

from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import esper
from esper.kasmina import optimizer_saving
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from user_models import (
    CNN,
    PLANT_FIRST,
    OneBuffer,
    TiedLanguageModel,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    random_vectors,
    script,
    stage_of,
    train_epoch,
    walk_to,
)

EPOCHS = 12
IMAGES, HELD_OUT = random_images(48, seed=1), random_images(48, seed=2)
LENGTHS = StageLengths(ramp=2)
CHOICES = {0: (1, 0, 1, 2), 1: (1, 1, 2, 0), 4: (3, 0, 0, 0), 5: (2, 1, 0, 0), 6: (1, 0, 1, 0)}
"""A gated seed in the first slot, fossilized; one in the second, culled; a second generation in the
first.
"""
STOPS = {
    0: ["BLENDING", "DORMANT"],
    3: ["PROBATIONARY", "PROBATIONARY"],
    4: ["FOSSILIZED", "PROBATIONARY"],
    6: ["BLENDING", "EMBARGOED"],
}
"""decision -> what the two slots are after it"""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True), None


def adamw_cosine(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def sgd_lambda(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 - epoch / (2 * EPOCHS))


def adam_one_cycle(parameters):
    optimizer = torch.optim.Adam(parameters, lr=1e-2, amsgrad=True)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS + 1)


def sgd_multi_step(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return optimizer, lr_scheduler.MultiStepLR(optimizer, [3, 7])


def by_rank(parameters):
    """Weights decay, biases and norms do not: the usual two groups."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9), None


SETUPS = {
    "sgd": (sgd, {}),
    "sgd, seeds faster": (sgd, {"seed_lr": 2.0}),
    "adamw and cosine": (adamw_cosine, {}),
    "sgd and lambda": (sgd_lambda, {}),
    "adam and one cycle": (adam_one_cycle, {}),
    "sgd and multi step": (sgd_multi_step, {}),
    "two parameter groups": (by_rank, {}),
}
every_setup = pytest.mark.parametrize("setup", SETUPS)


def attach(garden, setup):
    build, options = SETUPS[setup]
    optimizer, scheduler = build(garden.parameters())
    garden.attach(optimizer, scheduler, **options)
    return optimizer, scheduler


def live(garden, optimizer, scheduler, epochs):
    for epoch in epochs:
        train_epoch(garden.model, optimizer, epoch, IMAGES)
        if scheduler is not None:
            scheduler.step()
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
        yield epoch


def outcome(garden, optimizer):
    """Weights, buffers, history, states, momentum, rates: all that a run leaves behind."""
    names = {id(p): name for name, p in garden.model.named_parameters()}
    momentum = {
        (names[id(p)], key): value.tolist() if isinstance(value, torch.Tensor) else value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {
        "weights": {name: value.tolist() for name, value in garden.model.state_dict().items()},
        "history": garden.history,
        "states": [slot.state for slot in garden.model.slots.values()],
        "momentum": momentum,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "epoch": (garden.epoch, garden.memory),
    }


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory):
    """One uninterrupted run per setup, saved after every step."""

    @cache
    def run(setup):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("saves")
        garden = grow_cnn(
            CHOICES, keeps=False, lengths=LENGTHS, host=CNN(dropout=0.2), attach=False, max_seeds=4
        )
        optimizer, scheduler = attach(garden, setup)
        stages = {}
        for epoch in live(garden, optimizer, scheduler, range(EPOCHS)):
            garden.save(folder / str(epoch))
            stages[epoch] = [stage_of(garden), stage_of(garden, "r0c1")]
        return folder, stages, outcome(garden, optimizer)

    return run


def resume(folder, setup, stop):
    torch.manual_seed(99)  # the fresh host's own weights must not matter
    garden = esper.load(folder / str(stop), CNN(dropout=0.2), policy=script(CHOICES, keeps=False))
    optimizer, scheduler = attach(garden, setup)
    list(live(garden, optimizer, scheduler, range(stop + 1, EPOCHS)))
    return outcome(garden, optimizer)


@pytest.mark.parametrize("stop", [*STOPS, EPOCHS - 1])
@every_setup
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(saved_runs, setup, stop):
    folder, _, expected = saved_runs(setup)
    assert resume(folder, setup, stop) == expected


def test_the_resumed_runs_stopped_in_every_interesting_stage(saved_runs):
    _, stages, _ = saved_runs("sgd")
    assert {stop: stages[stop] for stop in STOPS} == STOPS


# -- what a save holds -----------------------------------------------------------------------------


def test_a_loaded_network_computes_what_the_saved_one_did(tmp_path):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, scale=1.0), "PROBATIONARY")
    loaded = esper.load(garden.save(tmp_path), CNN(), policy=script({}))
    assert torch.equal(loaded.model.eval()(IMAGES), garden.model.eval()(IMAGES))


def test_a_loaded_garden_has_the_same_reports_history_clock_and_limits(tmp_path):
    garden = walk_to(
        grow_cnn({0: PLANT_FIRST}, budget=3.0, max_seeds=3, higher_is_better=False), "PROBATIONARY"
    )
    loaded = esper.load(garden.save(tmp_path), CNN(), policy=script({}))
    assert loaded.model.get_slot_reports() == garden.model.get_slot_reports()
    assert (loaded.epoch, loaded.memory, loaded.history) == (
        garden.epoch,
        garden.memory,
        garden.history,
    )
    assert (loaded.model.budget, loaded.model.max_seeds) == (garden.model.budget, 3)
    assert loaded.higher_is_better is False
    assert loaded.model.settings == garden.model.settings


def test_a_named_policy_is_found_again_with_its_memory(tmp_path):
    garden = grow_cnn(policy="heuristic", max_seeds=4)
    for _ in range(4):
        garden.step(made_up(garden))
    loaded = esper.load(garden.save(tmp_path), CNN())
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    for _ in range(6):
        assert loaded.step(made_up(loaded)) == garden.step(made_up(garden))


def test_another_policy_begins_without_the_memory_of_the_first(tmp_path):
    garden = grow_cnn(policy="schedule:epochs=0:places=r0c0.norm", max_seeds=4)
    garden.step(made_up(garden))
    assert garden.memory[0]["done"] == [0]
    loaded = esper.load(garden.save(tmp_path), CNN(), policy="schedule:epochs=0:places=r0c1.norm")
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    assert loaded.memory is None
    loaded.step(made_up(loaded))
    assert stage_of(loaded, "r0c1") != "DORMANT"


def test_what_another_policy_left_undecided_no_standing_order_keeps(tmp_path, capsys):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, keeps=False), "PROBATIONARY")
    garden.step(made_up(garden))
    loaded = esper.load(garden.save(tmp_path), CNN(), policy="never")
    assert 'never keeps none of them by itself. Keep conv_light with garden.keep("r0c0")' in (
        capsys.readouterr().err
    )
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    loaded.step(made_up(loaded))
    assert stage_of(loaded) == "PROBATIONARY"
    loaded.keep("r0c0")
    assert stage_of(loaded) == "FOSSILIZED"


def test_a_seed_that_was_not_measured_yet_is_the_new_rules_to_keep(tmp_path):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, keeps=False), "PROBATIONARY")
    loaded = esper.load(garden.save(tmp_path), CNN(), policy="never")
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    loaded.step(made_up(loaded))
    assert stage_of(loaded) == "FOSSILIZED"


class Counting:
    """A policy that counts its decisions and waits."""

    def decide(self, observation, masks, reports, memory, signals):
        return np.array([(0, 0, 0, 0)]), (memory or 0) + 1


class CountingRule(Counting):
    """As another class it is another policy."""


def test_a_lambda_is_known_by_the_policy_that_it_builds(tmp_path, capsys):
    garden = grow_cnn(policy=lambda facts: Counting())
    garden.step(made_up(garden))
    garden.save(tmp_path)
    # another lambda, on another line
    loaded = esper.load(tmp_path, CNN(), policy=lambda facts: Counting())
    assert loaded.memory == garden.memory == 1
    assert loaded.policy_name == "Counting()"
    assert capsys.readouterr().err == ""
    other = esper.load(tmp_path, CNN(), policy=lambda facts: CountingRule())
    assert other.memory is None
    said = capsys.readouterr().err
    assert "grown by Counting(); CountingRule() starts without its memory" in said


def build_counting(facts, start=0):
    return Counting()


def test_a_partial_is_known_by_its_function(tmp_path):
    garden = grow_cnn(policy=partial(build_counting, start=1))
    assert garden.policy_name == "build_counting()"


def test_the_rate_of_seeds_goes_on_unless_another_one_is_given(tmp_path):
    garden = grow_cnn(attach=False)
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1), seed_lr=0.5)
    garden.save(tmp_path)
    for given, expected in ((None, 0.5), (2.0, 2.0)):
        loaded = esper.load(tmp_path, CNN(), policy=script({}))
        loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.1), seed_lr=given)
        assert loaded.model.link.seed_lr == expected
        loaded.restore(tmp_path)
        assert loaded.model.link.seed_lr == expected


def test_a_garden_without_an_optimizer_can_be_saved(tmp_path):
    garden = grow_cnn(attach=False)
    loaded = esper.load(garden.save(tmp_path), CNN(), policy="never")
    assert loaded.pending_optimizer is None


def test_a_loaded_garden_that_is_saved_before_an_optimizer_is_attached_keeps_its_state(tmp_path):
    garden = grow_cnn()
    optimizer = garden.model.link.optimizer
    losses_of(garden.model, IMAGES).mean().backward()
    optimizer.step()
    garden.save(tmp_path)
    esper.load(tmp_path, CNN(), policy="never").save(tmp_path)
    again = esper.load(tmp_path, CNN(), policy="never")
    own = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
    again.attach(own)
    momenta = [
        [state["momentum_buffer"] for state in each.state.values()] for each in (optimizer, own)
    ]
    assert len(momenta[1]) == len(list(again.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*momenta, strict=True))
    assert own.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("rate", "kind"), [(torch.tensor(0.25), torch.Tensor), (np.float32(0.25), float)]
)
def test_a_rate_that_is_no_float_is_saved_and_a_tensor_stays_the_same_one(rate, kind, tmp_path):
    garden = grow_cnn(attach=False)
    garden.attach(torch.optim.AdamW(garden.parameters(), lr=rate))
    garden.save(tmp_path)
    again = esper.load(tmp_path, CNN(), policy="never")
    own = torch.tensor(0.5) if kind is torch.Tensor else 0.5
    optimizer = torch.optim.AdamW(again.parameters(), lr=own)
    again.attach(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [float(each) for each in rates] == [0.25] * len(rates)
    assert all(isinstance(each, kind) for each in rates)
    assert kind is float or rates[0] is own


@pytest.mark.parametrize("option", ["capturable", "fused", None])
def test_the_count_of_steps_is_where_the_optimizer_counts(option):
    """Like torch's own load_state_dict; the device `meta` stands for a GPU."""
    network = torch.nn.Linear(2, 2, device="meta", bias=False)
    optimizer = torch.optim.AdamW(network.parameters())
    options = {option: True} if option else {}
    facts = {
        "scalars": {"weight": {}},
        "groups": [{"names": ["weight"], "options": options, "tuples": [], "tensors": {}}],
    }
    facts |= {"scheduler": None, "peak_rate": 1.0, "was_high": True, "steps": 1}
    tensors = {"weight|step": torch.tensor(3.0), "weight|exp_avg": torch.zeros(2, 2)}
    link = SimpleNamespace(optimizer=optimizer, scheduler=None, is_seed_lr_given=True)
    optimizer_saving._restore_one(network, link, facts, tensors)
    places = {key: value.device.type for key, value in optimizer.state[network.weight].items()}
    assert places == {"step": "meta" if option else "cpu", "exp_avg": "meta"}


def test_an_incubating_seed_goes_on_incubating(tmp_path):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(training=3)), "TRAINING")
    garden.shadow(lambda: losses_of(garden.model, IMAGES).mean())
    loaded = esper.load(garden.save(tmp_path), CNN(), policy=script({}))
    assert loaded.model.slot("r0c0").state == garden.model.slot("r0c0").state
    assert loaded.model.shadow_passes == 1


def test_the_next_seed_of_a_loaded_garden_is_born_with_the_same_weights(tmp_path):
    choices = {0: PLANT_FIRST, 2: (1, 1, 1, 0)}
    garden = walk_to(grow_cnn(choices), "BLENDING")
    loaded = esper.load(garden.save(tmp_path), CNN(), policy=script(choices))
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    for each in (garden, loaded):
        walk_to(each, "BLENDING", "r0c1")
    seeds = [each.model.slot("r0c1").seed.state_dict() for each in (garden, loaded)]
    assert all(torch.equal(value, seeds[1][name]) for name, value in seeds[0].items())


def test_an_optimizer_may_own_more_than_the_model(tmp_path):
    garden = grow_cnn({0: PLANT_FIRST}, attach=False)
    temperature = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*garden.parameters(), temperature], lr=0.1, momentum=0.9)
    garden.attach(optimizer)
    (losses_of(garden.model, IMAGES).mean() * temperature).backward()
    optimizer.step()
    assert garden.save(tmp_path) == tmp_path


def test_loading_leaves_the_random_state_alone(tmp_path):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}), "BLENDING")
    garden.save(tmp_path)
    host = CNN()
    state = torch.get_rng_state()
    esper.load(tmp_path, host, policy="never")
    assert torch.equal(torch.get_rng_state(), state)


# -- tied weights ----------------------------------------------------------------------------------


def tied_garden():
    garden = esper.grow(
        TiedLanguageModel(),
        slots="body",
        example=torch.zeros(2, 5, dtype=torch.long),
        blueprints=["mlp"],
        policy=script({0: PLANT_FIRST}),
        settings=GrowthSettings(scale_at_birth=1.0),
    )
    garden.attach(torch.optim.AdamW(garden.parameters(), lr=0.1))
    return garden


def test_tied_weights_are_tied_and_the_same_after_loading(tmp_path):
    garden = walk_to(tied_garden(), "BLENDING")
    tokens = torch.randint(7, (4, 5))
    garden.model(tokens).square().mean().backward()
    garden.model.link.optimizer.step()
    loaded = esper.load(garden.save(tmp_path), TiedLanguageModel(), policy=script({}))
    assert loaded.model.host.head.weight is loaded.model.host.embedding.weight
    assert torch.equal(loaded.model(tokens), garden.model(tokens))


def test_weights_that_are_parts_of_one_tensor_are_saved_and_stay_so(tmp_path):
    vectors = random_vectors(8, seed=1)
    options = {
        "blueprints": ["mlp"],
        "policy": script({0: PLANT_FIRST}),
        "settings": GrowthSettings(scale_at_birth=1),
    }
    garden = esper.grow(OneBuffer(), slots="enter", example=vectors, **options)
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.step(lambda: losses_of(garden.model, vectors))
    host = OneBuffer()
    loaded = esper.load(garden.save(tmp_path / "save"), host, policy="never")
    assert torch.equal(loaded.model(vectors), garden.model(vectors))
    assert len({parameter.untyped_storage().data_ptr() for parameter in host.parameters()}) == 1


def test_a_save_is_replaced_by_the_next_one_and_leaves_no_rubbish(tmp_path):
    garden = grow_cnn({0: PLANT_FIRST})
    for epoch in range(3):
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(made_up(garden))
        garden.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert esper.load(tmp_path, CNN(), policy="never").epoch == 3
