"""Which hosts there are: random seeds that a user names, or that follow from a run's seed."""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from esper.kasmina.randomness import mix_seed, read_seed
from esper.leyline.errors import SettingError, outline


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
