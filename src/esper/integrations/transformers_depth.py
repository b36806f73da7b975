"""Getting deeper under transformers' Trainer: call `join_depth` before `train`."""

from collections.abc import Mapping
from typing import Any

from esper.garden.depth_schedule import DepthSchedule
from esper.integrations import require, restore_depth, write_depth
from esper.integrations.accelerate import refuse_sharding
from esper.leyline.errors import SettingError

require("transformers")
from transformers import Trainer, TrainerCallback  # noqa: E402


class DepthCallback(TrainerCallback):
    """Steps a depth schedule after every optimiser step; `tokens` is what such a step sees."""

    def __init__(self, depth: DepthSchedule, tokens: int):
        self.depth = depth
        self.tokens = tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the optimiser that the Trainer made, for a network of this depth."""
        self.depth.attach(kwargs["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the tokens of a step."""
        self.depth.step(tokens=self.tokens)


def join_depth(
    trainer: Trainer,
    *,
    layers: str,
    to: int,
    total: int,
    tokens: int,
    plan: Mapping[int, float] | None = None,
) -> DepthSchedule:
    """Let a trainer's model get deeper; every checkpoint has the schedule, and resuming reads it.

    Args:
        trainer: any Trainer, in one process or with DDP.
        layers: name of the list of layers, as in "model.layers".
        to: how many layers the network ends with.
        total: tokens of the whole run, over all processes.
        tokens: tokens of one optimiser step, over all processes.
        plan: shares of `total` by depth; without it the law decides.

    Returns:
        The schedule, as `esper.DepthSchedule` makes it.
    """
    loop: Any = trainer
    refuse_sharding(loop.accelerator)
    if loop.args.load_best_model_at_end or loop.model_init is not None:
        name = "model_init" if loop.model_init is not None else "load_best_model_at_end"
        raise SettingError(
            f"the trainer has {name}, and a network that became deeper does not go back; leave it "
            f"out, and load the checkpoint that you want afterwards."
        )
    depth = DepthSchedule(loop.model, None, layers=layers, to=to, total=total, plan=plan)
    trainer.add_callback(DepthCallback(depth, tokens))
    load, save = loop._load_from_checkpoint, loop._save

    def load_deep(checkpoint: str, model: Any = None) -> None:
        restore_depth(checkpoint, depth)
        load(checkpoint, model)

    def save_deep(output_dir: str | None = None, state_dict: Any = None) -> None:
        save(output_dir, state_dict)
        write_depth(output_dir or loop.args.output_dir, depth)

    loop._load_from_checkpoint = load_deep
    loop._save = save_deep
    return depth
