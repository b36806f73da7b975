"""Which tasks there are: the built-in ones, and those that users enter."""

from esper.leyline.errors import UnknownNameError
from esper.leyline.registry import enter
from esper.runtime.tasks.builtin import BUILT_IN
from esper.runtime.tasks.gymnasium_ids import register_growth
from esper.runtime.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in BUILT_IN}


def register_task(task: Task, *, replace: bool = False) -> Task:
    """Enter a task under its name, for the command line, `get_task` and `gymnasium.make`.

    A name that is taken is refused unless `replace` says that the new task is meant.

    >>> import dataclasses, esper
    >>> from esper.runtime.tasks.registry import TASKS, get_task
    >>> short = dataclasses.replace(get_task("digits"), name="short_digits", epochs=4)
    >>> esper.register_task(short) is get_task("short_digits")
    True
    >>> esper.register_task(short, replace=True).epochs
    4
    >>> del TASKS["short_digits"]
    """
    entered = enter(TASKS, f"task {task.name!r}", task.name, task, replace)
    register_growth(task.name)
    return entered


def get_task(name: str) -> Task:
    """Return the task of this name."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS, "A task of your own: esper --import FILE.")
    return TASKS[name]
