"""Growth of every task under an id of Gymnasium: `gymnasium.make("esper/blobs-v0")`.

Importing `esper` enters the built-in tasks, so nothing here may load torch: environments are named,
and Gymnasium imports them when it makes one.
"""

import re

BUILT_IN_NAMES = (
    "digits",
    "digits_varied",
    "blobs",
    "code",
    "code_tiny",
    "python_text",
    "shakespeare",
    "tinystories",
    "fashion_mnist",
    "fashion_varied",
    "cifar10",
    "cifar10_varied",
    "cifar10_deep",
    "cifar10_resnet",
)
"""In the order in which `esper list` shows them; `builtin` has a task for each."""

_SPELLABLE = re.compile(r"[\w.-]+")
_ENVIRONMENTS = "esper.simic.gymnasium_envs"


def register_growth(task_name: str) -> None:
    """Let Gymnasium make `esper/<task_name>-v0`, one host or, with `make_vec`, several.

    Ids cannot have every letter that a task's name may have: a name of anything but letters,
    digits, `_`, `-` and `.` has no id. The task is looked up by its name when one is made, so an
    id that is there already serves a task that took the place of another. Without gymnasium there
    is nobody to tell.
    """
    try:
        import gymnasium as gym
    except ModuleNotFoundError as missing:
        if missing.name == "gymnasium":
            return
        raise
    env_id = f"esper/{task_name}-v0"
    if env_id in gym.registry or not _SPELLABLE.fullmatch(task_name):
        return
    gym.register(
        env_id,
        entry_point=f"{_ENVIRONMENTS}:GrowthEnv",
        vector_entry_point=f"{_ENVIRONMENTS}:grow_side_by_side",
        kwargs={"task": task_name},
    )


def register_built_in() -> None:
    """Let Gymnasium make growth of every task that comes with Esper."""
    for name in BUILT_IN_NAMES:
        register_growth(name)
