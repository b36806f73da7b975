"""Random numbers from a named seed; the global generators are as before afterwards."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from esper.leyline.errors import SettingError, is_number, outline


def read_seed(seed: object, name: str = "seed") -> int:
    """A seed that a user passes: a whole number that is not below 0."""
    if not is_number(seed, 0, is_whole=True):
        raise SettingError(f"{name} is {outline(seed)}; it must be a whole number of at least 0.")
    return int(seed)  # type: ignore[call-overload]  # a number, as was just asked


def mix_seed(*parts: int) -> int:
    """One random seed from several numbers, the same on every machine.

    >>> mix_seed(7, 1) == mix_seed(7, 1), mix_seed(7, 1) == mix_seed(7, 2)
    (True, False)
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=7)
    return int.from_bytes(digest.digest(), "big")


@contextmanager
def own_randomness(*parts: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """Draw everything inside from the seed made of `parts`.

    That holds for the CPU and for the named CUDA devices.
    """
    seed = mix_seed(*parts)
    with torch.random.fork_rng(devices=list(devices)):
        # `torch.manual_seed` would seed every CUDA device in the process and leave it so
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
