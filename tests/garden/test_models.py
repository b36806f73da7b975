"""Models as people build them:

branches that begin at zero, members that stand twice in a list, autocast inside.
"""

import copy

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.pricing import HostFlops
from esper.leyline.errors import EsperError, HostError, SaveError, SettingError, UnknownNameError
from esper.runtime.population import Population
from user_models import MLP, losses_of, made_up, random_vectors, script

VECTORS = random_vectors(32, seed=1)


class Block(nn.Module):
    def __init__(self, is_zero=False):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 12), nn.Linear(12, 6)
        if is_zero:
            nn.init.zeros_(self.leave.weight)
            nn.init.zeros_(self.leave.bias)

    def forward(self, features):
        return features + self.leave(torch.relu(self.enter(features)))


class Counting(nn.Module):
    """Goes through its blocks by a number of its own."""

    def __init__(self):
        super().__init__()
        self.count, self.blocks, self.head = (
            3,
            nn.ModuleList(Block(is_zero=True) for _ in range(3)),
            nn.Linear(6, 3),
        )

    def forward(self, vectors):
        for number in range(self.count):
            vectors = self.blocks[number](vectors)
        return self.head(vectors)


def stir(garden):
    """As if it had trained."""
    with torch.no_grad():
        for parameter in garden.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def garden_of(model, slot, blueprint, policy="never", **options):
    options = {
        "example": VECTORS[:4],
        "blueprints": [blueprint],
        "policy": policy,
        "budget": 20.0,
    } | options
    garden = esper.grow(model, slots=[slot], **options)
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    return garden


def test_a_zeroed_copy_is_the_identity_where_branches_begin_at_zero():
    plant = {0: (1, 0, 1, 0)}
    garden = garden_of(
        nn.Sequential(Block(is_zero=True), nn.Linear(6, 3)), "0", "copy_zero", script(plant)
    )
    stir(garden)
    before = garden.model(VECTORS)
    garden.step(made_up(garden))
    assert garden.model.active_seeds == 1
    assert torch.equal(garden.model(VECTORS), before)


def test_a_harvest_runs_all_blocks_of_a_host_that_counts_them():
    garden = garden_of(Counting(), "blocks.1", "copy")
    garden.model.build_in("r0c0", "copy")
    stir(garden)
    garden.model.eval()
    assert torch.equal(garden.harvest().eval()(VECTORS), garden.model(VECTORS))


def test_a_module_that_stands_twice_in_a_list_stays_twice_in_the_harvest():
    drop = nn.Dropout(0.5)
    model = nn.Sequential(Block(), drop, Block(), drop, nn.Linear(6, 3))
    garden = garden_of(model, "0", "copy")
    garden.model.build_in("r0c0", "copy")
    assert [type(part).__name__ for part in garden.harvest()] == [
        "Block",
        "Block",
        "Dropout",
        "Block",
        "Dropout",
        "Linear",
    ]


def test_deepen_counts_layers_that_are_shared():
    model, (first, second, _) = Counting(), Counting().blocks
    model.blocks, model.count = nn.ModuleList([first, first, second, second]), 4
    with pytest.raises(EsperError, match="has 4 layers"):
        esper.deepen(model, to=3)


class OwnPrecision(MLP):
    def forward(self, vectors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(vectors)


@pytest.mark.parametrize("blend", [0, 2], ids=["linear", "gated"])
def test_seeds_have_the_type_of_the_weights_where_the_model_opens_autocast(blend, tmp_path):
    garden = garden_of(OwnPrecision(), "middle", "mlp", script({0: (1, 0, 1, blend)}))
    for _ in range(4):
        losses_of(garden.model, VECTORS).mean().backward()
        garden.model.link.optimizer.step()
        garden.step(lambda: losses_of(garden.model, VECTORS).detach().float())
    assert garden.model.fossilized_seeds == 1
    assert {parameter.dtype for parameter in garden.model.slots.parameters()} == {torch.float32}
    garden.export(tmp_path / "out")
    again = esper.load(garden.save(tmp_path / "save"), OwnPrecision(), policy="never")
    assert torch.equal(again.model(VECTORS), garden.model(VECTORS))


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights():
    garden = garden_of(MLP(), "middle", "mlp")
    garden.model.compile(backend="eager")
    expected = garden.model(VECTORS).detach().clone()
    kept = copy.deepcopy(garden.model)
    stir(garden)
    assert torch.equal(kept(VECTORS), expected)


def test_a_model_that_keeps_an_activation_can_be_exported(tmp_path):
    class Keeping(MLP):
        def forward(self, vectors):
            self.kept = super().forward(vectors)
            return self.kept

    garden = garden_of(Keeping(), "middle", "mlp")
    garden.model.build_in("r0c0", "mlp")
    garden.model(VECTORS)
    assert (garden.export(tmp_path / "out") / "grown.py").is_file()


def test_a_refused_garden_leaves_the_model_free(tmp_path):
    model = MLP()
    for policy in ("heurstic", lambda facts: 1 / 0):
        with pytest.raises((UnknownNameError, ZeroDivisionError)):
            garden_of(model, "middle", "mlp", policy)
    garden = garden_of(model, "middle", "mlp")
    fresh = MLP()
    with pytest.raises(UnknownNameError):
        esper.load(garden.save(tmp_path), fresh, policy="heurstic")
    assert esper.load(tmp_path, fresh, policy="never").epoch == 0


def test_a_save_with_another_blend_goes_on_after_a_restore(tmp_path):
    plant = script({0: (1, 0, 1, 0)})
    first = garden_of(
        MLP(), "middle", "mlp", plant, settings=esper.GrowthSettings(blends=("gated",))
    )
    for _ in range(3):
        losses_of(first.model, VECTORS).mean().backward()
        first.model.link.optimizer.step()
        first.step(lambda: losses_of(first.model, VECTORS))
    second = garden_of(
        MLP(), "middle", "mlp", plant, settings=esper.GrowthSettings(blends=("linear",))
    )
    second.restore(first.save(tmp_path))
    losses_of(second.model, VECTORS).mean().backward()
    second.model.link.optimizer.step()
    second.step(lambda: losses_of(second.model, VECTORS))
    assert second.epoch == 4


def test_epochs_are_whole_and_scores_are_told_by_a_bool(tmp_path):
    with pytest.raises(SettingError, match=r"7\.5"):
        esper.GrowthSettings(epochs=7.5)
    garden = garden_of(MLP(), "middle", "mlp", higher_is_better=1)
    assert esper.load(garden.save(tmp_path), MLP(), policy="never").higher_is_better is True


class Extra(MLP):
    def get_extra_state(self):
        return {"calls": object()}

    def set_extra_state(self, state):
        pass


class Expanded(MLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(8))


@pytest.mark.parametrize(("model", "name"), [(Extra, "_extra_state"), (Expanded, "mask")])
def test_what_cannot_be_saved_is_refused_by_name(model, name, tmp_path):
    garden = garden_of(model(), "middle", "mlp")
    with pytest.raises(SaveError, match=f"{name} (of|holds a object)"):
        garden.save(tmp_path / "save")
    assert not (tmp_path / "save").exists() or not list((tmp_path / "save").iterdir())


def test_named_parameters_in_several_groups_are_attached():
    garden = esper.grow(MLP(), slots=["middle"], example=VECTORS[:4])
    named = list(garden.model.named_parameters())
    groups = [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.1}]
    garden.attach(torch.optim.AdamW(groups, lr=0.1))
    assert garden.model.link is not None


class Recurrent(nn.Module):
    def __init__(self, kind=""):
        super().__init__()
        self.kind = kind
        self.rnn = nn.LSTM(4, 8, 2, dropout=0.5 if kind == "lstm" else 0.0, batch_first=True)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, texts):
        start = torch.zeros(2, len(texts), 8)  # made on the way, as many do
        features = self.middle(self.rnn(texts, (start, start))[0][:, -1])
        return self.head(
            nn.functional.dropout(features, 0.5, self.training and self.kind == "function")
        )


def test_the_flops_of_an_lstm_count():
    steps, layers = 5, (4 * 32 + 8 * 32) + (8 * 32 + 8 * 32)
    expected = 2 * (steps * layers + 8 * 8 + 8 * 2)
    assert HostFlops.of_model(Recurrent(), torch.randn(3, steps, 4), {}).whole == expected


TEXTS = torch.randn(120, 5, 4, generator=torch.Generator().manual_seed(0))
DATA = [(text, int(text[0, 0] > 0)) for text in TEXTS]


def task_of(kind="", data=DATA):
    sizes = {
        "batch": 40,
        "slots": ("middle",),
        "epochs": 3,
        "lr": 0.05,
        "blueprints": ("mlp",),
        "budget": 20.0,
    }
    return esper.task_from_datasets(
        "recurrent", data, DATA[:20], lambda: Recurrent(kind), 2, **sizes
    )


@pytest.mark.parametrize("kind", ["lstm", "function"])
def test_a_host_that_drops_in_its_own_way_does_not_care_who_trains_beside_it(kind):
    found = set()
    for number, seeds in enumerate(([0], [0], [0, 1])):
        torch.manual_seed(number)
        hosts = Population(task_of(kind), seeds)
        hosts.train_epoch()
        hosts.evaluate()
        found.add(hosts.readings()[0].held_out_loss)
    assert len(found) == 1


def test_twins_of_other_data_are_not_taken(tmp_path):
    other = [(text, 1 - label) for text, label in DATA]
    environments = [
        esper.GrowthVectorEnv(task_of(data=data), 1, host_seeds=[0], folder=tmp_path)
        for data in (DATA, other)
    ]
    assert len(list(tmp_path.glob("twin-*.json"))) == 2
    assert environments[0].twins != environments[1].twins


def test_a_host_that_cannot_be_scored_is_refused_by_name():
    task = esper.task_from_datasets(
        "pair", DATA, DATA[:20], lambda: nn.LSTM(4, 2), 2, batch=40, slots=("middle",)
    )
    with pytest.raises(HostError, match="task pair"):
        Population(task, [0])
