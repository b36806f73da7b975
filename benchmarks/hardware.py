"""What a measurement ran on, in words."""

import platform

import torch


def hardware(device: str) -> str:
    name = (
        torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"{platform.machine()} CPU, 1 thread"
    )
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"
