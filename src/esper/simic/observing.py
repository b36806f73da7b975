"""From a host's readings to the signals that policies look at. The one place where runtime's words become tamiyo's."""

import math

from esper.leyline.legality import GrowthView
from esper.runtime.host import EpochReading
from esper.runtime.tasks import Task
from esper.tamiyo.signals import EpochSignals
from esper.telemetry.events import finite


def epoch_signals(task: Task, epoch: int, reading: EpochReading, view: GrowthView) -> EpochSignals:
    """What the epoch that has just been lived looked like, `epoch` epochs into the episode."""
    budget = view.budget or view.params_used
    seeds = view.max_seeds or max(view.seeds_used, view.space.slots.num_slots)
    return EpochSignals(
        progress=epoch / task.epochs,
        lr_share=reading.lr / task.lr,
        train_loss=finite(reading.train_loss),
        held_out_loss=finite(reading.held_out_loss),
        train_accuracy=finite(reading.train_accuracy),
        held_out_accuracy=finite(reading.held_out_accuracy),
        params_share=view.params_used / budget,
        seeds_share=view.seeds_used / seeds,
    )


def loss_scale(task: Task) -> float:
    """The loss of guessing."""
    return -math.log(task.chance)
