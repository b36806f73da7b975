"""A host that was written to disk and read back goes on as if it had never stopped, to the bit."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from cases import with_slow
from esper.kasmina.hosts import build_cnn_host, build_transformer_host
from esper.leyline.errors import SaveError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.stages import SeedStage
from esper.runtime.population import Population
from esper.runtime.storing import can_be_stored
from esper.runtime.tasks.data import load_python_text
from esper.runtime.tasks.registry import get_task
from runtime.episodes import (
    BLOBS,
    COPIES,
    CULL,
    FOSSILIZE,
    GERMINATE,
    GROWTH,
    IMAGES,
    QUICK,
    act,
    differing,
    play,
    print_of,
)
from runtime.stored import restore, store

SEEDS = [7, 8]
VECTORS = {
    0: [(GERMINATE, "r0c0", "mlp", "gated")],
    3: [(FOSSILIZE, "r0c0")],
    4: [(GERMINATE, "r0c1", "lora")],
}


class Dropping(nn.Module):
    """A plain module that draws random numbers while it trains."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.4))
        self.head = nn.Linear(8, 2)

    def forward(self, points):
        return self.head(self.body(points))


POINTS = replace(BLOBS, epoch_examples=100, batch=32)
TEXT = replace(
    get_task("python_text"),
    load=lambda root: load_python_text(context=16, size=4000),
    build_host=lambda: build_transformer_host(
        vocabulary=256, width=16, layers=2, heads=2, context=16, slots=2
    ),
    epoch_examples=32,
    batch=16,
    lengths=QUICK,
    epochs=12,
)
CASES = {
    "sgd, batch norm, augmentation": (replace(IMAGES, lr=0.02), GROWTH),
    "adamw": (replace(POINTS, optimizer="adamw", lr=0.01), VECTORS),
    "text": (
        TEXT,
        {
            0: [(GERMINATE, "r0c0", "attention", "gated")],
            3: [(FOSSILIZE, "r0c0"), (GERMINATE, "r0c1", "norm")],
        },
    ),
    "copies": (replace(TEXT, blueprints=("copy", "copy_zero"), budget=4.0), COPIES),
    "dropout": (
        replace(POINTS, build_host=Dropping, slots=("body",), budget=30.0),
        {0: [(GERMINATE, "r0c0", "mlp")], 3: [(FOSSILIZE, "r0c0")]},
    ),
    "incubation": (
        replace(IMAGES, lr=0.02, lengths=StageLengths(training=2, ramp=2)),
        {0: GROWTH[0]},
    ),
    "embargo": (
        replace(POINTS, lengths=StageLengths(ramp=3, embargo=2, resetting=1)),
        {
            0: [(GERMINATE, "r0c0", "mlp")],
            1: [(CULL, "r0c0")],
            5: [(GERMINATE, "r0c0", "lora", "sigmoid")],
        },
    ),
}
EPOCHS = 7


def measured(task, script, epoch, **options):
    """Hosts that have lived `epoch` epochs and have been trained and measured in one more."""
    population = Population(task, SEEDS, **options)
    play(population, epoch, dict.fromkeys(range(len(SEEDS)), script))
    population.train_epoch()
    population.evaluate()
    return population


def decide(population, script, epoch):
    for host in range(len(population.runs)):
        for move in script.get(epoch, []):
            act(population, host, *move)
    population.tick()


def go_on(population, script, epoch):
    """Decide about the epoch just measured, then live on to the end."""
    decide(population, script, epoch)
    play(
        population,
        EPOCHS - epoch - 1,
        dict.fromkeys(range(len(population.runs)), script),
        start=epoch + 1,
    )


def whole(population, host):
    """All that decides how a host goes on, and what it has cost."""
    run, governor = population.runs[host], population.governors[host]
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    groups = [
        [names[id(parameter)] for parameter in group["params"]]
        for group in run.optimizer.param_groups
    ]
    births = run.model.births, run.model.shadow_passes
    return print_of(population, host) | {
        "groups": groups,
        "births": births,
        "ledger": run.ledger.counts(),
        "governor": governor.state(),
        "seed": run.seed,
    }


def differences(population, other):
    return [
        differing(whole(population, host), whole(other, host))
        for host in range(len(population.runs))
    ]


def restored(task, folder, **options):
    population = Population(task, SEEDS, **options)
    restore(population, folder)
    return population


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", with_slow(CASES, {"dropout", "embargo", "incubation", "text"}))
def test_a_host_read_back_after_every_epoch_has_the_same_episode(case, tmp_path):
    """Before and after germinating, incubating, blending, fossilizing, culling, in embargo."""
    task, script = CASES[case]
    straight, broken_up = Population(task, SEEDS), Population(task, SEEDS)
    for epoch in range(EPOCHS):
        for population in (straight, broken_up):
            population.train_epoch()
            population.evaluate()
        assert differences(straight, broken_up) == [[], []], f"epoch {epoch}"
        store(broken_up, tmp_path / str(epoch))
        broken_up = restored(task, tmp_path / str(epoch))
        assert differences(straight, broken_up) == [[], []], f"epoch {epoch}, read back"
        for population in (straight, broken_up):
            decide(population, script, epoch)


def test_the_cases_have_what_they_are_named_for():
    """A ramp half way, a gated fossil, an embargo, an incubated seed:

    all are stored somewhere above.
    """
    seen = set()
    for case in ("adamw", "incubation", "embargo"):
        task, script = CASES[case]
        population = Population(task, [7])
        for epoch in range(5):
            play(population, 1, {0: script}, start=epoch)
            for slot in population.runs[0].slots:
                seen |= {slot.state.stage} | {
                    "gated" for fossil in slot.fossils if fossil.gate is not None
                }
                seen |= {"half way"} if 0 < slot.state.alpha < 1 else set()
    needed = {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.PROBATIONARY, SeedStage.EMBARGOED}
    assert seen >= needed | {"gated", "half way"}


def test_a_host_goes_on_in_bfloat16(tmp_path):
    population = measured(IMAGES, GROWTH, 2, amp="bf16")
    store(population, tmp_path)
    again = restored(IMAGES, tmp_path, amp="bf16")
    for episodes in (population, again):
        go_on(episodes, GROWTH, 2)
    assert differences(population, again) == [[], []]


def test_enabled_slots_go_on_under_their_own_ids(tmp_path):
    host = partial(build_cnn_host, blocks=3, base_channels=2, in_channels=1, image_size=8)
    task = replace(IMAGES, build_host=host, slots=("r0c0", "r0c2"), lr=0.02)
    script = {0: [(GERMINATE, "r0c2", "conv_small")], 3: [(FOSSILIZE, "r0c2")]}
    population = measured(task, script, 4)
    store(population, tmp_path)
    again = restored(task, tmp_path)
    assert list(again.reports()[0]) == ["r0c0", "r0c2"]
    for episodes in (population, again):
        go_on(episodes, script, 4)
    assert differences(population, again) == [[], []]


def test_storing_changes_nothing(tmp_path):
    population, untouched = (measured(IMAGES, GROWTH, 3) for _ in range(2))
    store(population, tmp_path)
    for episodes in (population, untouched):
        go_on(episodes, GROWTH, 3)
    assert differences(population, untouched) == [[], []]


def test_seconds_are_counted_on(tmp_path):
    population = measured(POINTS, {}, 1)
    store(population, tmp_path)
    assert restored(POINTS, tmp_path).runs[0].ledger.phases == population.runs[0].ledger.phases


def test_hosts_that_have_lived_on_can_be_put_back_too(tmp_path):
    """Where a save turns out to be damaged, the one before is read into the same hosts."""
    population = measured(IMAGES, GROWTH, 1)
    store(population, tmp_path / "early")
    early = [whole(population, host) for host in range(2)]
    go_on(population, GROWTH, 1)
    restore(population, tmp_path / "early")
    assert [differing(before, whole(population, host)) for host, before in enumerate(early)] == [
        [],
        [],
    ]


# -- the governor ----------------------------------------------------------------------------------


def break_down(population, host=0, value=math.nan):
    with torch.no_grad():
        next(population.runs[host].model.host.parameters()).fill_(value)


def test_a_restored_host_is_brought_back_to_what_was_stored(tmp_path):
    population = measured(IMAGES, GROWTH, 2)
    store(population, tmp_path)
    again = restored(IMAGES, tmp_path)
    for episodes in (population, again):
        episodes.tick()
        break_down(episodes)
        episodes.train_epoch()
        assert [rollback.host for rollback in episodes.evaluate()] == [0]
    assert set(differences(population, again)[0]) <= {
        "reading"
    }  # not a number is not equal to itself
    for episodes in (population, again):
        play(episodes, 2)
    assert differences(population, again) == [[], []]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_host_that_was_just_brought_back_can_be_stored(value, tmp_path):
    """Its reading is of the epoch that broke, and holds what JSON has no signs for."""
    population = measured(IMAGES, GROWTH, 2)
    population.tick()
    break_down(population, value=value)
    population.train_epoch()
    assert population.evaluate()
    store(population, tmp_path)
    again = restored(IMAGES, tmp_path)
    assert set(differences(population, again)[0]) <= {"reading"}
    assert str(again.runs[0].reading) == str(population.runs[0].reading)
    assert not math.isfinite(again.runs[0].reading.train_loss)


def test_of_a_host_that_lost_its_seeds_no_more_is_expected_than_before_the_save(tmp_path):
    """A rollback culls the seeds, and with them goes what was expected of the network that had
    them.
    """
    population = measured(IMAGES, {0: GROWTH[0]}, 3)
    population.tick()
    break_down(population)
    population.train_epoch()
    assert [change.slot_id for change in population.evaluate()[0].changes] == ["r0c0"]
    store(population, tmp_path)
    again = restored(IMAGES, tmp_path)
    for episodes in (population, again):
        episodes.train_epoch()
        episodes.evaluate()
    assert [governor.best_accuracy for governor in again.governors] == [
        governor.best_accuracy for governor in population.governors
    ]


def test_rollbacks_are_counted_on(tmp_path):
    population = measured(POINTS, {}, 1)
    break_down(population)
    population.train_epoch()
    assert population.evaluate()
    store(population, tmp_path)
    assert [governor.rollbacks for governor in restored(POINTS, tmp_path).governors] == [1, 0]


def test_a_host_under_suspicion_cannot_be_stored():
    """Its last good state is an earlier one, and that is not what would be written."""
    population = measured(POINTS, {}, 1)
    assert can_be_stored(population)
    governor = population.governors[1]
    governor.judge(replace(population.runs[1].reading, held_out_loss=99.0))
    assert governor.bad_checks == 1
    assert not can_be_stored(population)


# -- what does not fit -----------------------------------------------------------------------------


def test_the_host_of_another_seed_is_refused(tmp_path):
    store(measured(POINTS, {}, 0), tmp_path)
    with pytest.raises(SaveError, match="seed 7, not 9"):
        restore(Population(POINTS, [9]), tmp_path)


def test_another_host_is_refused(tmp_path):
    store(measured(POINTS, {}, 0), tmp_path)
    other = replace(POINTS, build_host=Dropping, slots=("body",), budget=30.0)
    with pytest.raises(SaveError, match="another model"):
        restore(Population(other, SEEDS), tmp_path)
