"""Lightning's own checkpoints around a growing network, in one process and in two."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from esper.leyline.errors import SaveError, SettingError
from esper.leyline.lifecycle import StageLengths
from esper.telemetry.events import GrowthReported, HostEpoch
from garden.test_processes import digest
from simic.team_workers import assert_ended_well, run_ranks
from user_models import grow_cnn, losses_of, random_images

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.slow
IMAGES, HELD_OUT = random_images(32), random_images(16, seed=2)
PLAN = {0: (1, 0, 1, 0), 1: (1, 1, 2, 0), 4: (1, 0, 3, 0)}
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


class Module(lightning.LightningModule):
    def __init__(self, garden):
        super().__init__()
        self.garden, self.net = garden, garden.model

    def training_step(self, batch, index):
        return losses_of(self.net, batch).mean()

    def validation_step(self, batch, index):
        self.log("loss", losses_of(self.net, batch).mean(), sync_dist=True)

    def test_step(self, batch, index):
        self.log("tested", losses_of(self.net, batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.garden.parameters(), lr=1e-2)
        self.garden.attach(optimizer)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def make_garden(seed=0, plan=PLAN, **options):
    torch.manual_seed(seed)
    garden = grow_cnn(plan, attach=False, scale=0.5, max_seeds=4, **options)
    garden.ema(0.9)
    return garden


def fit(
    folder,
    garden,
    *,
    every=None,
    is_validated=False,
    ckpt_path=None,
    epochs=6,
    held_out=HELD_OUT,
    **options,
):
    from esper.integrations.lightning import GrowthCallback

    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    growth = GrowthCallback(garden, lambda: losses_of(garden.model, held_out), every)
    callbacks = [saving, growth, *options.pop("callbacks", ())]
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, **{**QUIET, **options}
    )
    loaders = DataLoader(IMAGES, 8), DataLoader(HELD_OUT, 16) if is_validated else None
    trainer.fit(Module(garden), *loaders, ckpt_path=ckpt_path)
    return garden


def state_of(garden):
    averages = {f"average of {name}": value for name, value in garden.average.tensors().items()}
    return {
        name: value.clone() for name, value in {**garden.model.state_dict(), **averages}.items()
    }


def history_of(garden):
    """All that happened; a report tells seconds, which no two runs share."""
    return [event for event in garden.history if not isinstance(event, GrowthReported)]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("is_validated", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_fit_is_the_uninterrupted_one(stop, every, is_validated, tmp_path):
    how = {"every": every, "is_validated": is_validated}
    whole = fit(tmp_path / "whole", make_garden(), **how)
    path = tmp_path / "whole" / f"epoch={stop}.ckpt"
    resumed = fit(tmp_path / "again", make_garden(seed=99), ckpt_path=path, **how)
    assert resumed.epoch == whole.epoch
    assert history_of(resumed) == history_of(whole)
    assert_same(state_of(resumed), state_of(whole))
    assert whole.model.fossilized_seeds


def test_what_growing_was_worth_is_said_at_the_end(tmp_path, capsys):
    garden = fit(tmp_path / "sound", make_garden())
    assert str(garden.history[-1]) in capsys.readouterr().out


def test_a_rate_that_a_finder_chose_is_trained_with(tmp_path):
    from esper.integrations.lightning import GrowthCallback

    garden, seen = make_garden(plan={}), []

    class Rated(Module):
        lr = 1e-2

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.garden.parameters(), lr=self.lr)
            self.garden.attach(optimizer)
            return optimizer

        def on_train_epoch_end(self):
            seen.append(
                (
                    self.lr,
                    self.trainer.optimizers[0].param_groups[0]["lr"],
                    self.garden.model.link.peak_rate,
                )
            )

    growth = GrowthCallback(garden, lambda: losses_of(garden.model, HELD_OUT))
    finder = lightning.pytorch.callbacks.LearningRateFinder(num_training_steps=30, attr_name="lr")
    options = {
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        "callbacks": [growth, finder],
        **QUIET,
    }
    trainer = lightning.Trainer(max_epochs=1, **options)
    trainer.fit(Rated(garden), DataLoader(random_images(320), 8))
    (rate, used, peak) = seen[-1]
    assert rate == used == peak != 1e-2


def test_testing_a_checkpoint_leaves_the_record_of_the_run_whole(tmp_path):
    from esper.integrations.lightning import GrowthCallback

    garden = make_garden()
    garden.record(tmp_path / "run")
    fit(tmp_path, garden, epochs=4)
    events = (tmp_path / "run" / "events-0.jsonl").read_bytes()
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=[GrowthCallback(garden, lambda: None)], **QUIET
    )
    trainer.test(Module(garden), DataLoader(HELD_OUT, 16), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert garden.epoch == 2
    assert (tmp_path / "run" / "events-0.jsonl").read_bytes() == events


def test_a_garden_that_has_trained_goes_back_to_a_checkpoint(tmp_path):
    """The optimiser is a new one:

    its state comes by name, not by the order in which fossils join it.
    """
    plan = {0: (1, 1, 1, 0), 1: (1, 0, 1, 0)}
    garden = fit(tmp_path, make_garden(plan=plan, lengths=StageLengths(ramp=1)), epochs=9)
    assert [len(slot.fossils) for slot in garden.model.slots.values()] == [1, 1]
    expected, history = state_of(garden), history_of(garden)
    fit(tmp_path / "again", garden, epochs=9, ckpt_path=tmp_path / "epoch=7.ckpt")
    assert history_of(garden) == history
    assert_same(state_of(garden), expected)


@pytest.mark.ranks
def test_two_processes_stay_equal_and_resume(tmp_path):
    class Note(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            found.append(digest(module))

    found = []

    def live(rank):
        how = {
            "devices": 2,
            "strategy": "ddp",
            "callbacks": [Note()],
            "held_out": HELD_OUT[rank::2],
        }
        grown = fit(tmp_path / "whole", make_garden(seed=rank), **how)
        resumed = fit(
            tmp_path / "again",
            make_garden(seed=9),
            ckpt_path=tmp_path / "whole" / "epoch=2.ckpt",
            **how,
        )
        assert grown.model.fossilized_seeds
        assert history_of(resumed) == history_of(grown)
        return list(found)

    ended = run_ranks(tmp_path, 2, live, seconds=120)
    assert_ended_well(ended)
    first, second = (each.value for each in ended)
    assert first == second
    assert len(set(first[:6])) == 6
    assert first[6:] == first[3:6]


def test_testing_a_checkpoint_has_the_structure_of_that_checkpoint(tmp_path):
    from esper.integrations.lightning import GrowthCallback

    garden = fit(tmp_path, make_garden())
    grown = garden.model.total_params
    growth = GrowthCallback(garden, lambda: losses_of(garden.model, HELD_OUT))
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[growth], **QUIET)
    losses = [
        trainer.test(
            Module(garden),
            DataLoader(HELD_OUT, 16),
            tmp_path / f"epoch={epoch}.ckpt",
            verbose=False,
        )
        for epoch in (5, 0)
    ]
    assert (garden.epoch, garden.model.total_params < grown) == (1, True)
    assert losses[0] != losses[1]


def test_a_checkpoint_without_a_garden_is_refused(tmp_path):
    garden = make_garden()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", enable_checkpointing=False, **QUIET
    )
    trainer.fit(Module(garden), DataLoader(IMAGES, 8))
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    with pytest.raises(SaveError, match="state_dict"):
        fit(tmp_path, make_garden(), ckpt_path=tmp_path / "bare.ckpt")


def test_a_checkpoint_can_be_read_without_unpickling(tmp_path):
    fit(tmp_path, make_garden(), epochs=2)
    checkpoint = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert "manifest.json" in checkpoint["garden"]


@pytest.mark.parametrize("name", ["{}/evil", "../evil"])
def test_a_checkpoint_writes_nothing_outside(tmp_path, name):
    fit(tmp_path, make_garden(), epochs=1)
    path = tmp_path / "epoch=0.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["garden"][name.format(tmp_path)] = torch.zeros(3, dtype=torch.uint8)
    torch.save(checkpoint, path)
    with pytest.raises(SaveError, match="not a plain file name, and nothing was written"):
        fit(tmp_path / "again", make_garden(), ckpt_path=path)
    assert not (tmp_path / "evil").exists()


def test_what_would_not_know_of_seeds_is_refused(tmp_path):
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(1e-3)
    with pytest.raises(SettingError, match=r"StochasticWeightAveraging .*garden\.ema"):
        fit(tmp_path, make_garden(), callbacks=[averaging])


def test_a_module_without_the_gardens_model_is_refused(tmp_path):
    from esper.integrations.lightning import GrowthCallback

    growth = GrowthCallback(make_garden(), lambda: torch.zeros(2))
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[growth], **QUIET)
    with pytest.raises(SettingError, match=r"Module .*garden\.model"):
        trainer.fit(Module(make_garden()), DataLoader(IMAGES, 8))


def test_a_strategy_that_shards_is_refused():
    from esper.integrations.lightning import GrowthCallback

    garden = make_garden()
    trainer = SimpleNamespace(strategy=lightning.pytorch.strategies.FSDPStrategy(), callbacks=[])
    with pytest.raises(SettingError, match=r"FSDPStrategy .*garden\.harvest"):
        GrowthCallback(garden, lambda: torch.zeros(2)).setup(trainer, Module(garden), "fit")


class Noting(lightning.pytorch.callbacks.Callback):
    """The losses of all batches, by their epoch."""

    def __init__(self):
        self.losses = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        share = float(outputs["loss"]) * trainer.accumulate_grad_batches
        self.losses.setdefault(trainer.current_epoch, []).append(share)


@pytest.mark.parametrize("batches", [1, 2], ids=["plain", "accumulated"])
def test_the_garden_is_given_the_mean_training_loss_of_each_epoch(tmp_path, batches):
    noting = Noting()
    options = {"accumulate_grad_batches": batches, "callbacks": [noting]}
    garden = fit(tmp_path, make_garden(), epochs=3, **options)
    measured = [event for event in garden.history if isinstance(event, HostEpoch)]
    for epoch, event in enumerate(measured):
        losses = noting.losses[epoch]
        assert event.train_loss == pytest.approx(sum(losses) / len(losses))
    assert len(measured) == 3


@pytest.mark.parametrize("skipped", [None, {}], ids=["no batch", "training_step returned None"])
def test_a_batch_that_was_skipped_has_no_loss(skipped):
    from esper.integrations.lightning import GrowthCallback

    garden = make_garden()
    growth = GrowthCallback(garden, lambda: losses_of(garden.model, HELD_OUT))
    module = SimpleNamespace(automatic_optimization=True)
    for number, outputs in enumerate([{"loss": torch.tensor(0.5)}, skipped], start=1):
        trainer = SimpleNamespace(global_step=number, is_last_batch=False)
        growth.on_train_batch_end(trainer, module, outputs, IMAGES, number)
    assert garden.loss_meter.take() == 0.5


def test_lightnings_loggers_get_what_grew_at_every_step_of_the_garden(tmp_path):
    rows = []

    class Notes(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            if "growth/params" in metrics:
                rows.append((step, metrics))

    garden = fit(tmp_path / "logged", make_garden(), epochs=3, logger=[Notes()])
    assert [step for step, _ in rows] == [4, 8, 12]
    assert rows[-1][1]["growth/params"] == garden.model.total_params
