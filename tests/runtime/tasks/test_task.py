"""Tasks:

the registry, the plan of learning rates, the built-in problems, and a user's own in a page of code.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from esper.leyline.errors import DataError, EsperError, HostError, SettingError, UnknownNameError
from esper.leyline.stages import SeedStage
from esper.runtime.config import TaskConfig
from esper.runtime.population import Population
from esper.runtime.tasks import registry
from esper.runtime.tasks.builtin import BUILT_IN
from esper.runtime.tasks.data import load_python_text
from esper.runtime.tasks.datasets import stack_examples, task_from_datasets
from esper.runtime.tasks.registry import TASKS, get_task, register_task
from esper.runtime.tasks.task import FIELDS, cross_entropy_scores, training_fields
from esper.simic.twins import fingerprint
from runtime.episodes import BLOBS, CULL, GERMINATE, act, epochs, play
from simic.growths import twin_readings

# -- registry --------------------------------------------------------------------------------------


def test_the_built_in_tasks_are_there():
    built_in = {
        "digits",
        "blobs",
        "python_text",
        "shakespeare",
        "tinystories",
        "fashion_mnist",
        "cifar10",
    }
    assert built_in | {"cifar10_deep", "cifar10_resnet"} <= set(TASKS)


def test_an_unknown_task_gets_the_nearest_name():
    with pytest.raises(UnknownNameError, match=r"task 'cifar'.*'cifar10'"):
        get_task("cifar")


def test_a_registered_task_is_found_by_its_name(monkeypatch):
    monkeypatch.setattr(registry, "TASKS", dict(TASKS))
    own = register_task(replace(BLOBS, name="mine"))
    assert get_task("mine") is own


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch .* 1"),
        ({"epochs": 0}, "epochs|episode"),
        ({"optimizer": "adam"}, "'adam'.*'adamw'"),
        ({"epoch_examples": 0}, "epoch_examples"),
        ({"epoch_examples": -5}, "epoch_examples"),
        ({"held_out": 1}, "held_out .*2.*1"),
    ],
    ids=str,
)
def test_an_impossible_task_is_refused_by_its_setting(changes, words):
    with pytest.raises(EsperError, match=words):
        replace(BLOBS, **changes)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cifar10", 6_400), ("cifar10_deep", 100_000), ("cifar10_resnet", 175_258)],
)
def test_the_cnn_hosts_have_about_the_size_they_are_known_for(name, parameters):
    size = sum(parameter.numel() for parameter in get_task(name).build_host().parameters())
    assert size == pytest.approx(parameters, rel=0.1)


def test_the_python_text_trains_a_language_model():
    task = replace(get_task("python_text"), epoch_examples=320, batch=32)
    population = Population(task, [1])
    first = population.train_epoch()[0].train_loss
    assert population.train_epoch()[0].train_loss < first


# -- learning rates --------------------------------------------------------------------------------


def test_the_rate_is_constant_and_then_falls_to_zero_along_a_cosine():
    task = replace(BLOBS, lr=0.2, constant_share=0.6, epochs=5)
    assert [task.rate(epoch) for epoch in range(3)] == [0.2] * 3
    # the middles of the last two epochs are a quarter and three quarters down the cosine
    assert [task.rate(3), task.rate(4)] == pytest.approx([0.17071, 0.02929], abs=1e-5)
    assert replace(task, epochs=1000).rate(999) < 1e-6


def test_the_plan_does_not_depend_on_actions():
    quiet = epochs(BLOBS, [1], epochs=8, script={})
    script = {
        0: [(GERMINATE, "r0c0", "mlp")],
        2: [(GERMINATE, "r0c1", "lora")],
        4: [(CULL, "r0c0")],
    }
    busy = Population(BLOBS, [1])
    play(busy, 8, {0: script}, keeps=False)
    for population in (quiet, busy):
        population.train_epoch()
    assert quiet.readings()[0].lr == busy.readings()[0].lr == BLOBS.rate(8)
    rates = [population.runs[0].optimizer.param_groups[0]["lr"] for population in (quiet, busy)]
    assert rates[0] == rates[1]


def test_hosts_train_at_the_rate_of_their_plan():
    task = replace(BLOBS, epochs=4, constant_share=0.25, epoch_examples=64)
    population = Population(task, [1])
    seen = []
    for _ in range(4):
        seen.append(population.train_epoch()[0].lr)
        assert population.runs[0].optimizer.param_groups[0]["lr"] == seen[-1]
    assert seen == pytest.approx([task.rate(epoch) for epoch in range(4)])
    assert seen[3] < seen[2] < seen[1] < seen[0] == task.lr


# -- scores ----------------------------------------------------------------------------------------


def test_a_texts_loss_and_accuracy_are_means_over_its_tokens():
    outputs, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    losses, correct = cross_entropy_scores(outputs, targets)
    for row in range(3):
        own, right = cross_entropy_scores(outputs[row], targets[row])
        torch.testing.assert_close((losses[row], correct[row]), (own.mean(), right.mean()))


# -- held-out examples -----------------------------------------------------------------------------

SMALL_TEXT = replace(
    get_task("python_text"),
    load=lambda root: load_python_text(size=20_000),
    epoch_examples=64,
    batch=32,
)


@pytest.mark.parametrize("task", [BLOBS, SMALL_TEXT], ids=["points", "text"])
def test_hosts_are_measured_on_exactly_the_first_validation_examples(task):
    population = Population(replace(task, held_out=7), [1])
    population.train_epoch()
    population.evaluate()
    run, validation = population.runs[0], task.load(None).validation
    run.model.eval()
    with torch.no_grad():
        inputs, targets = validation.gather(torch.arange(7))
        losses, correct = task.score(run.model(inputs), targets)
    assert len(run.splits.validation) == 7 < len(validation)
    assert run.reading.held_out_loss == pytest.approx(float(losses.double().mean()), rel=1e-6)
    assert run.reading.held_out_accuracy == pytest.approx(float(correct.double().mean()), rel=1e-6)
    assert run.ledger.phases["validation"].examples == 7


def test_evidence_says_how_many_held_out_examples_it_rests_on():
    population = Population(replace(BLOBS, held_out=20), [1])
    play(population, 4, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    assert population.runs[0].slots[0].state.contribution.examples == 20


def test_what_is_held_out_changes_neither_training_nor_the_final_score():
    few, all_of_them = (Population(replace(BLOBS, held_out=count), [1]) for count in (7, None))
    for population in (few, all_of_them):
        play(population, 2)
    assert few.readings()[0].train_loss == all_of_them.readings()[0].train_loss
    finals = [population.final_scores()[0] for population in (few, all_of_them)]
    assert (finals[0].accuracy, finals[0].loss) == (finals[1].accuracy, finals[1].loss)


def test_more_held_out_examples_than_there_are_are_refused():
    there = len(BLOBS.load(None).validation)
    Population(replace(BLOBS, held_out=there), [1])
    with pytest.raises(SettingError, match=rf"held_out is {there + 1}, .*{there};"):
        Population(replace(BLOBS, held_out=there + 1), [1])


def test_a_twin_on_fewer_held_out_examples_is_another_twin(tmp_path):
    task = replace(BLOBS, epochs=2, epoch_examples=64)
    prints = [fingerprint(replace(task, held_out=count), {}) for count in (None, 10, 11)]
    assert len(set(prints)) == 3
    readings = [
        twin_readings(replace(task, held_out=count), [1], tmp_path)[1] for count in (None, 10)
    ]
    assert readings[0][0].train_loss == readings[1][0].train_loss
    assert readings[0][0].held_out_loss != readings[1][0].held_out_loss


# -- slots by id -----------------------------------------------------------------------------------


def slots_of(task):
    return dict(Population(task, [1]).runs[0].model.slot_config.modules)


@pytest.mark.parametrize(
    ("slots", "modules"),
    [
        (None, {"r0c0": "sites.0", "r0c1": "sites.1"}),
        (("r0c1",), {"r0c1": "sites.1"}),
        (("r0c1", "r0c0", "r0c1"), {"r0c0": "sites.0", "r0c1": "sites.1"}),
        (("sites.1",), {"r0c0": "sites.1"}),
    ],
)
def test_slots_are_a_hosts_own_by_id_or_modules_by_name(slots, modules):
    assert slots_of(replace(BLOBS, slots=slots)) == modules


def test_an_enabled_slot_is_reported_and_planted_under_its_own_id():
    population = Population(replace(BLOBS, slots=("r0c1",)), [1])
    assert list(population.reports()[0]) == ["r0c1"]
    play(population, 4, {0: {0: [(GERMINATE, "r0c1", "mlp")]}})
    assert population.reports()[0]["r0c1"].metrics.counterfactual_contribution is not None


def test_an_id_that_the_host_does_not_have_is_refused():
    with pytest.raises(UnknownNameError, match=r"slot 'r0c2'.* r0c0, r0c1\."):
        Population(replace(BLOBS, slots=("r0c0", "r0c2")), [1])


def test_a_host_that_does_not_know_its_slots_has_no_ids():
    with pytest.raises(EsperError, match="r0c0"):
        Population(own_task(slots=("r0c0",)), [1])


# -- a task where one seed is right ----------------------------------------------------------------


def accuracy_of(blueprint):
    """After a whole episode on the blobs with this seed, planted first thing, always in the
    output.
    """
    task = get_task("blobs")
    population = Population(task, [0, 1, 2])
    if blueprint is not None:
        for host in range(3):
            act(population, host, GERMINATE, "r0c0", blueprint)
    population.tick()
    for _ in range(task.epochs):
        population.train_epoch()
        population.evaluate()
        if (
            blueprint is not None
            and population.reports()[0]["r0c0"].stage is not SeedStage.PROBATIONARY
        ):
            population.tick()
    return [reading.held_out_accuracy for reading in population.readings()]


def test_the_linear_host_cannot_tell_the_blobs_apart():
    assert max(accuracy_of(None)) < 0.62


def test_an_mlp_seed_solves_the_blobs():
    assert min(accuracy_of("mlp")) > 0.85


def test_a_linear_seed_does_not_help_on_the_blobs():
    assert max(accuracy_of("lora")) < 0.62


# -- a user's own task -----------------------------------------------------------------------------


class Rings(Dataset):
    """Points labelled by their distance from the middle."""

    def __init__(self, count, seed):
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], int(self.points[index].norm() > 1.2)


class Plain(nn.Module):
    """A module that knows nothing of slots or segments."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, points):
        return self.head(self.body(points))


OWN = {
    "train": Rings(400, 1),
    "test": Rings(100, 2),
    "build_host": Plain,
    "classes": 2,
    "slots": ("body",),
    "batch": 32,
    "budget": 40,
}


def own_task(**changes):
    return task_from_datasets("rings", **{**OWN, **changes})


def test_any_data_set_and_any_module_make_a_task():
    population = Population(own_task(epochs=8), [1, 2])
    play(population, 6, {0: {0: [(GERMINATE, "r0c0", "mlp", "gated")]}})
    report = population.reports()[0]["r0c0"]
    assert report.metrics.counterfactual_contribution is not None or report.fossil_count
    finals = population.final_scores()
    assert min(final.accuracy for final in finals) > 0.8
    assert len(population.runs[0].splits.validation) == 60


def test_a_plain_module_is_measured_without_segments_to_the_same_numbers():
    """The counterfactual of a host that cannot be run in parts is a full pass with the seed
    bypassed.
    """
    population = Population(own_task(epochs=8), [1])
    play(population, 2, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    population.train_epoch()
    run = population.runs[0]
    inputs, targets = run.splits.validation.gather(torch.arange(60))
    run.model.eval()
    with torch.no_grad():
        together = nn.functional.cross_entropy(run.model(inputs), targets, reduction="none")
        with run.model.slot_off("r0c0"):
            alone = nn.functional.cross_entropy(run.model(inputs), targets, reduction="none")
    population.evaluate()
    found = population.reports()[0]["r0c0"].metrics.counterfactual_contribution
    assert found == pytest.approx(float((alone - together).double().mean()), rel=1e-5, abs=1e-8)


def test_a_plain_module_without_named_slots_is_refused_with_the_way_out():
    with pytest.raises(HostError, match=r"slots"):
        Population(own_task(slots=None), [1])


def test_a_slot_on_a_module_that_is_not_there_is_refused():
    with pytest.raises(EsperError, match="bodyy"):
        Population(own_task(slots=("bodyy",)), [1])


def test_a_batch_larger_than_the_split_is_refused():
    with pytest.raises(SettingError, match=r"batch .*341 .*340 examples"):
        Population(own_task(batch=341), [1])


def test_a_batch_as_large_as_the_split_is_taken():
    population = Population(own_task(batch=340), [1])
    population.train_epoch()
    assert (population.runs[0].plan.steps, population.runs[0].plan.examples) == (1, 340)


class Three(Plain):
    def __init__(self):
        super().__init__()
        self.body[0] = nn.Linear(3, 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"build_host": Three}, r"shape \(2,\)"), ({"classes": 5}, "5 classes")],
)
def test_a_host_that_does_not_fit_the_data_is_refused_before_training(changes, words):
    with pytest.raises(HostError, match=words):
        Population(own_task(**changes), [1])


def pairs(*examples):
    return list(examples)


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        (pairs(), "is empty"),
        (pairs((torch.zeros(2), 0), (torch.zeros(3), 0)), "different shapes"),
        (pairs((torch.zeros(2), 2)), "2 to 2, .*classes=2"),
        (pairs((torch.zeros(2), -1)), "labels .*-1"),
        (pairs((torch.zeros(2), 0.5)), "whole numbers"),
        (pairs((torch.tensor([0.0, float("nan")]), 0)), "NaN or Inf"),
        (pairs(torch.zeros(2)), r"pair \(tensor, label\)"),
        (pairs((torch.zeros(2), torch.tensor([1, 0]))), "label"),
        (pairs((torch.zeros(2), "cat")), "label"),
    ],
    ids=[
        "empty",
        "shapes",
        "label 2",
        "label -1",
        "half a label",
        "nan",
        "no label",
        "one-hot",
        "word",
    ],
)
def test_examples_of_a_wrong_form_are_refused_by_data_set(examples, words):
    with pytest.raises(DataError, match=rf"(?s)mine.*{words}"):
        stack_examples(examples, 2, "mine")


def test_too_few_examples_are_refused():
    with pytest.raises(DataError, match="4 training examples"):
        Population(own_task(train=Rings(4, 1)), [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8], ids=str)
def test_inputs_of_the_usual_number_types_train(dtype):
    points = (torch.rand(100, 2) * 10).to(dtype)
    data = TensorDataset(points, (points[:, 0] > 5).long())
    (reading,) = Population(own_task(train=data, test=data), [1]).train_epoch()
    assert reading.train_loss > 0


class Words(Plain):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def forward(self, tokens):
        return self.head(self.body(self.words(tokens).mean(1)))


def test_whole_numbers_can_be_tokens():
    """An embedding reads them as they are."""
    data = TensorDataset(torch.randint(10, (100, 4)), torch.randint(2, (100,)))
    population = Population(own_task(train=data, test=data, build_host=Words), [1])
    before = population.runs[0].model.host.words.weight.detach().clone()
    population.train_epoch()
    assert not torch.equal(population.runs[0].model.host.words.weight, before)


# -- what is known about the fields ----------------------------------------------------------------


def test_a_twin_changes_with_every_field_that_a_never_grown_host_feels():
    """Each field is marked, and one that is not marked as of growth is in the fingerprint."""
    task = replace(BLOBS, clock="compute", epoch_examples=32, held_out=8)
    changes = {
        "name": "other",
        "build_host": lambda: nn.Linear(2, 2),
        "chance": 0.25,
        "score": lambda outputs, targets: (outputs, targets),
        "batch": 16,
        "optimizer": "adamw",
        "beta2": 0.9,
        "lr": 0.04,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "clock": "epochs",
        "compute": 0.5,
        "reference": (lambda: nn.Linear(2, 2), 9),
        "warmup": 0.5,
        "decay": 0.5,
        "epoch_examples": 64,
        "held_out": 4,
        "epochs": 5,
        "augment": True,
    }
    of_the_splits = {"load", "varies"}  # what a host draws is in its variation
    of_clock_epochs = {"constant_share"}
    assert set(training_fields()) == {*changes, *of_the_splits, *of_clock_epochs}
    prints = {
        name: fingerprint(replace(task, **{name: value}), {}) for name, value in changes.items()
    }
    prints["the task itself"] = fingerprint(task, {})
    assert len(set(prints.values())) == len(prints)
    epochs = replace(task, clock="epochs")
    assert fingerprint(replace(epochs, constant_share=0.9), {}) != fingerprint(epochs, {})


def test_a_twin_does_not_change_with_growth():
    changes = {"slots": ("r0c0",), "budget": 2.0, "prunes": False, "summary": "another text"}
    assert fingerprint(replace(BLOBS, **changes), {}) == fingerprint(BLOBS, {})


@pytest.mark.parametrize("name", [name for name in TaskConfig.model_fields if name != "lengths"])
def test_a_setting_has_the_help_of_the_tasks_field(name):
    assert TaskConfig.model_fields[name].description.startswith(FIELDS[name].help)


@pytest.mark.parametrize("task", BUILT_IN, ids=lambda task: task.name)
def test_every_built_in_host_has_one_row_of_slots(task):
    with torch.device("meta"):
        slots = task.build_host().slot_config()
    assert slots.slot_ids == tuple(f"r0c{column}" for column in range(slots.num_slots))
