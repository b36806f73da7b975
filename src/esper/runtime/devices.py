"""Which host runs where.

An impossible device is an error before any work; the map is there to be printed.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from esper.leyline.errors import DeviceError, SettingError


def split_names(names: Sequence[str]) -> list[str]:
    """Return the names of devices, written apart or in one text."""
    joined = " ".join(names)
    return [name for name in re.split(r"[,\s]+", joined) if name]


def refuse_idle(hosts: int, names: Sequence[str]) -> None:
    """Raise an error where there are fewer hosts than devices."""
    devices = split_names(names)
    if hosts < len(devices):
        raise SettingError(
            f"hosts is {hosts}, but devices are {', '.join(devices)}: {len(devices) - hosts} would "
            f"stay idle. Raise hosts to {len(devices)} or more, or name fewer devices."
        )


def parse_devices(names: Sequence[str]) -> list[torch.device]:
    """Return devices by name, each checked to be there."""
    devices = []
    for name in split_names(names):
        try:
            device = torch.device(name)
        except RuntimeError as problem:
            raise DeviceError(
                f"{name!r} is not a device; write cpu, cuda, or cuda:0 cuda:1."
            ) from problem
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(f"device {name} is not supported. Use cpu or cuda.")
        if device.type == "cuda":
            _ask_for_queues()
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            device = torch.device("cuda", device.index or 0)
            if device.index >= count:
                raise DeviceError(
                    f"device {name!r} is not there: this machine has {count} CUDA devices. Name "
                    "one of those, or cpu."
                )
        devices.append(device)
    if not devices:
        raise DeviceError("no device was named; write cpu, cuda, or cuda:0 cuda:1.")
    return devices


def _ask_for_queues() -> None:
    """Ask for more queues, before CUDA starts: with its usual 8, streams wait for each other.

    Not with MPS, which has too few for many ranks.
    """
    if not os.path.exists(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def map_hosts(hosts: int, devices: Sequence[torch.device]) -> list[torch.device]:
    """Return one device per host, in equal contiguous shares."""
    if hosts < 1:
        raise DeviceError(f"{hosts} hosts cannot be mapped; a population needs at least one.")
    return [devices[index * len(devices) // hosts] for index in range(hosts)]


def describe_map(placed: Sequence[torch.device]) -> str:
    """Return one line for people: devices with the number of hosts on each."""
    parts = []
    for device, count in Counter(map(str, placed)).items():
        hosts = "host" if count == 1 else "hosts"
        parts.append(f"{device}: {count} {hosts}")
    return ", ".join(parts)


@contextmanager
def repeatable_kernels(wanted: bool) -> Iterator[None]:
    """Allow only kernels that give the same result twice, where there are such; others warn.

    Afterwards torch's settings are as before.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # read when CUDA is first used
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    did_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=did_warn_only)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Allow at most `count` CPU threads per operation, and as many as before afterwards.

    None changes nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
