"""Which executor runs a task, and which wishes are refused."""

from collections.abc import Sequence

import torch

from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.building import draws_random_numbers
from esper.runtime.executors.eager import EagerExecutor
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.host import AMP_TYPES
from esper.runtime.tasks.task import Task

EXECUTORS = ("auto", "eager", "graphed")


def choose_executor(
    name: str,
    amp: str,
    devices: Sequence[torch.device],
    task: Task,
    graph_memory: float | None = None,
) -> EagerExecutor | GraphedExecutor:
    """Build the executor of this name.

    `auto` is graphed where every device is a GPU and nothing needs the eager one. `graph_memory`
    is in GiB per device.
    """
    refuse_impossible(name, amp, [str(device) for device in devices], task)
    is_graphed = name == "graphed"
    if name == "auto" and all(device.type == "cuda" for device in devices):
        is_graphed = find_eager_only(task, amp) is None
    return GraphedExecutor(graph_memory) if is_graphed else EagerExecutor()


def refuse_impossible(executor: str, amp: str, devices: Sequence[str], task: Task) -> None:
    """Raise an error for what fp16 and captured graphs cannot do.

    Configurations and populations call it before any work.
    """
    if amp not in AMP_TYPES:
        raise UnknownNameError("amp", amp, AMP_TYPES)
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    on_cpu = ", ".join(device for device in devices if not device.startswith("cuda"))
    if amp == "fp16" and on_cpu:
        raise SettingError(f"amp fp16 needs CUDA devices, got {on_cpu}; on a CPU use bf16 or off.")
    if executor != "graphed":
        return
    if on_cpu:
        raise SettingError(
            f"executor graphed needs CUDA devices, got {on_cpu}; choose eager or auto."
        )
    eager_only = find_eager_only(task, amp)
    if eager_only is not None:
        raise SettingError(
            f"{eager_only} runs on the eager executor only; choose executor eager or auto."
        )


def find_eager_only(task: Task, amp: str) -> str | None:
    """Name what about this task a captured graph could not do right; None if nothing."""
    if amp == "fp16":
        return "amp fp16 with its scaler"
    if task.lengths.training > 0:
        return "the shadow pass of TRAINING seeds"
    if task.varies is not None:
        return f"{task.name}, a family of hosts that differ,"
    with torch.device("meta"):
        host = task.build_host()
    return "a host with dropout" if draws_random_numbers(host) else None
