"""Growing under transformers' Trainer, or any subclass of it: call `join` before `train`.

A callback alone cannot do it. The Trainer never tells callbacks from which checkpoint it resumes,
and it reads the optimiser's state, by position, before the first of them is called. So a trainer
that joins has five methods replaced.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.garden.garden import Garden
from esper.garden.measuring import Evaluate
from esper.integrations import GARDEN, Stepper, require
from esper.integrations.accelerate import refuse_sharding
from esper.leyline.errors import SettingError

require("transformers")
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.utils.generic import can_return_loss, find_labels  # noqa: E402


class GrowthCallback(Stepper, TrainerCallback):
    """Steps the garden before the Trainer saves.

    The Trainer may save between an epoch's last step and its end. `done` is the number of optimiser
    steps at the garden's last one, `trainer` logs what grew.
    """

    done = -1
    trainer: Trainer

    def log_growth(self, growth: dict[str, float]) -> None:
        """Log growth as the Trainer logs its losses: to its history and all it reports to."""
        control = self.trainer.control
        is_due = control.should_log
        self.trainer.log(growth)
        control.should_log = is_due  # or the loss of this step would count as logged

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step after an epoch's last optimiser step, or after every so many."""
        self.garden.loss_meter.steps += 1
        if self.every is None:
            is_due = state.epoch % 1 == 0 or state.global_step >= state.max_steps
        else:
            is_due = state.global_step % self.every == 0
        if is_due:
            self.done = state.global_step
            self.step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step after an epoch that ended early, or whose length was not known.

        Not where training was stopped within it: resumed, it goes on in the same epoch, and the
        garden steps at the end of that.
        """
        is_stopped = control.should_training_stop and state.epoch % 1 != 0
        if self.every is None and self.done != state.global_step and not is_stopped:
            self.step()


def join(
    trainer: Trainer,
    garden: Garden,
    evaluate: Evaluate,
    every: int | None = None,
    seed_lr: float | None = None,
) -> None:
    """Let a trainer of `garden.model` grow it: attach, step, save, resume, load the best.

    Every checkpoint has the garden beside the Trainer's own files, and
    `esper.load(checkpoint / "garden", model)` reads it too. Resuming and `load_best_model_at_end`
    restore structure and weights from there.

    Args:
        trainer: one that was built with `garden.model`.
        garden: what `esper.grow` returned.
        evaluate: losses of held-out examples, as `garden.step` wants them.
        every: optimiser steps from one `garden.step` to the next; by default it happens after each
            epoch.
        seed_lr: seeds learn at this multiple of the host's rate, as in `garden.attach`.
    """
    if trainer.model is not garden.model or trainer.model_init is not None:
        raise SettingError(
            f"the trainer has a {type(trainer.model).__name__}; write Trainer(garden.model, ...)."
        )
    refuse_sharding(trainer.accelerator)
    _show_host(trainer, garden)
    callback = GrowthCallback(garden, evaluate, every)
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.create_optimizer = partial(
        _create_optimizer, trainer, garden, seed_lr, trainer.create_optimizer
    )
    trainer.training_step = partial(_training_step, garden, trainer.training_step)
    trainer._save = partial(_save, trainer, garden, trainer._save)
    trainer._load_from_checkpoint = lambda checkpoint, model=None: garden.restore(
        Path(checkpoint, GARDEN)
    )
    trainer._load_best_model = lambda: _load_best(trainer, garden)


def _load_best(trainer: Trainer, garden: Garden) -> None:
    """Restore the garden of the best checkpoint."""
    garden.record(None)  # the run folder keeps the full history, not that up to the best epoch
    garden.restore(Path(str(trainer.state.best_model_checkpoint), GARDEN))


def _show_host(trainer: Any, garden: Garden) -> None:
    """Let the Trainer read off the host what it reads off a model's class.

    Those are labels, columns and how the loss is scaled.
    """
    host = garden.model.host
    parameters = inspect.signature(host.forward).parameters
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    trainer.model_accepts_loss_kwargs = getattr(host, "accepts_loss_kwargs", takes_any)
    trainer.label_names = trainer.args.label_names or find_labels(type(host))
    trainer.can_return_loss = can_return_loss(type(host))
    trainer._signature_columns = [*parameters, "label", "label_ids", *trainer.label_names]
    if "generation_config" in vars(garden.model):
        # Seq2SeqTrainer has set it there, and the host generates
        host.generation_config = vars(garden.model).pop("generation_config")
    # by its name a model has its labels shifted when smoothed
    vars(garden.model)["_get_name"] = host._get_name


def _create_optimizer(
    trainer: Trainer, garden: Garden, seed_lr: float | None, create: Callable[..., Any], *model: Any
) -> Any:
    """The Trainer's own, attached before its scheduler is made and before its state is read."""
    optimizer = create(*model)
    link = garden.model.link
    if link is None or link.optimizer is not getattr(optimizer, "optimizer", optimizer):
        garden.attach(optimizer, trainer.lr_scheduler, seed_lr=seed_lr)
    return optimizer


def _training_step(
    garden: Garden, train: Callable[..., Tensor], *arguments: Any, **options: Any
) -> Tensor:
    """The Trainer's own, whose loss the garden takes in: callbacks are never told it."""
    loss = train(*arguments, **options)
    garden.loss_meter.add(loss)
    return loss


def _save(
    trainer: Trainer,
    garden: Garden,
    save: Callable[..., Any],
    output_dir: Any = None,
    state_dict: Any = None,
) -> None:
    """Save the garden first: older checkpoints go when the Trainer is done with this one."""
    folder = str(trainer.args.output_dir if output_dir is None else output_dir)
    garden.save(Path(folder, GARDEN))
    state = garden.model.state_dict() if state_dict is None else state_dict
    # safetensors refuses tied weights: of those, the last name stays
    names = {}
    for name, tensor in state.items():
        names[tensor.data_ptr(), tensor.shape, tensor.numel() or name] = name
    save(folder, {name: state[name] for name in names.values()})
