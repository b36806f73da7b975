"""Lightning's own checkpoints around a growing network."""

import pytest
import torch
from torch.utils.data import DataLoader

from esper.leyline.errors import SaveError
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
        self.log("loss", losses_of(self.net, batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.garden.parameters(), lr=1e-2)
        self.garden.attach(optimizer)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def fit(folder, *, seed=0, every=None, is_validated=False, ckpt_path=None, epochs=6, grows=True):
    from esper.integrations.lightning import GrowthCallback

    torch.manual_seed(seed)
    garden = grow_cnn(PLAN, attach=False, scale=0.5, max_seeds=4)
    garden.ema(0.9)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    growth = [GrowthCallback(garden, lambda: losses_of(garden.model, HELD_OUT), every)] if grows else []
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[saving, *growth], **QUIET)
    held_out = DataLoader(HELD_OUT, 16) if is_validated else None
    trainer.fit(Module(garden), DataLoader(IMAGES, 8), held_out, ckpt_path=ckpt_path)
    return garden


def state_of(garden):
    averages = {f"average of {name}": value for name, value in garden.average.tensors().items()}
    return {**garden.model.state_dict(), **averages}


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("is_validated", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_fit_is_the_uninterrupted_one(stop, every, is_validated, tmp_path):
    whole = fit(tmp_path / "whole", every=every, is_validated=is_validated)
    path = tmp_path / "whole" / f"epoch={stop}.ckpt"
    resumed = fit(tmp_path / "again", seed=99, every=every, is_validated=is_validated, ckpt_path=path)
    expected, found = state_of(whole), state_of(resumed)
    assert resumed.epoch == whole.epoch
    assert resumed.history == whole.history
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert whole.model.fossilized_seeds


def test_a_checkpoint_without_a_garden_is_refused(tmp_path):
    fit(tmp_path, epochs=1, grows=False)
    with pytest.raises(SaveError, match="state_dict"):
        fit(tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt")


def test_a_checkpoint_can_be_read_without_unpickling(tmp_path):
    fit(tmp_path, epochs=2)
    checkpoint = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert "manifest.json" in checkpoint["esper"]
