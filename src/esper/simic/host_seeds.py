"""Which hosts there are, and how many: seeds that a user names, or that follow from a run's."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

from esper.kasmina.randomness import mix_seed, read_seed
from esper.leyline.errors import SettingError, is_number, outline
from esper.runtime.tasks.task import Task


def read_host_seeds(seeds: Iterable[Any]) -> tuple[int, ...]:
    """The hosts that a user names."""
    if not isinstance(seeds, Iterable):
        raise SettingError(f"host_seeds is {outline(seeds)}; name the hosts in a list, as [1, 2].")
    return tuple(read_seed(seed, "a host seed") for seed in seeds)


def draw_host_seeds(seed: int, wanted: int) -> tuple[int, ...]:
    """The hosts of a run, from its seed."""
    return tuple(islice(host_seed_draws(seed), wanted))


def host_seed_draws(seed: int) -> Iterator[int]:
    """The hosts that a run may have, from its seed, without end."""
    return (mix_seed(seed, 7, number) for number in count())


def read_count(task: Any, count: Any, host_seeds: Sequence[int]) -> int:
    """How many hosts there are; what cannot be an environment is refused."""
    if not isinstance(task, Task):
        raise SettingError(
            f"task is {task!r}; get_task(name) of esper.runtime.tasks.registry gives one."
        )
    if not is_number(count, 1, is_whole=True) or not host_seeds or task.epochs < 2:
        raise SettingError(
            f"growth needs a whole number of hosts, 1 host seed and 2 epochs; got {count!r}, "
            f"{len(host_seeds)} and {task.epochs}."
        )
    return int(count)


def read_share(value: Any, name: str, what: str) -> float:
    """A number from 0 to 1; `what` says what it is."""
    if not is_number(value, 0) or value > 1:
        raise SettingError(f"{name} is {value!r}; a {what} lies between 0 and 1.")
    return float(value)
