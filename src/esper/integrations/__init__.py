"""Growing inside other people's training loops.

Each module needs its framework, and is imported by its own name.
"""

from importlib import import_module
from typing import Any

from esper.garden.garden import Garden
from esper.garden.measuring import Evaluate
from esper.garden.processes import is_first
from esper.leyline.errors import EsperError, SettingError

GARDEN = "garden"  # folder of the garden inside a framework's own checkpoint
UNAWARE = (
    "would not know of seeds planted later. Use one process or DDP; what has to be "
    "sharded is garden.harvest()."
)


def require(framework: str) -> None:
    """Say in one line what is missing, and how to get it."""
    try:
        import_module(framework)
    except ImportError as problem:
        text = (
            f"esper.integrations.{framework} needs {framework} ({problem}); pip "
            f"install {framework}."
        )
        raise SettingError(text) from problem


class Stepper:
    """Steps the garden after every epoch, or after every so many optimiser steps, and prints what
    happens.
    """

    def __init__(self, garden: Garden, evaluate: Evaluate, every: int | None = None):
        if every is not None and (every < 1 or every % 1):
            raise SettingError(
                f"every must be whole, at least 1, or None for once per epoch, got {every!r}."
            )
        self.garden, self.evaluate, self.every = garden, evaluate, every

    def step(self) -> None:
        for event in self.garden.step(self.evaluate):
            if is_first():
                print(event)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Say what growing was worth; Trainer and Lightning call it by this name."""
        try:
            said = str(self.garden.report(self.evaluate))
        except (
            EsperError
        ) as problem:  # training is over, and what it made must not be lost for a report
            said = f"what growing was worth could not be measured: {problem}"
        if is_first():
            print(said)
