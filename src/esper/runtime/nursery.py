"""What the host of a seed is trained on, priced and on its device.

Hosts of most tasks share all of it; each host of a family has its own. Nothing is trained here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from esper.kasmina.pricing import HostFlops
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.slots import SlotConfig
from esper.runtime.building import build_network
from esper.runtime.clock import ComputeClock
from esper.runtime.executors.compiling import is_compiled
from esper.runtime.host import Home, HostRun
from esper.runtime.splits import Splits
from esper.runtime.tasks.families import concrete, for_host
from esper.runtime.tasks.task import Task, check_fit


@dataclass(frozen=True)
class WayToRun:
    """How hosts are run, whatever they are trained on."""

    devices: Sequence[torch.device]
    amp: str
    compile: str


class Nursery:
    """Builds the hosts of one task by their seeds."""

    def __init__(self, task: Task, splits: Splits, way: WayToRun):
        self.task = task
        self.way = way
        # whether episodes end with a measurement without undecided seeds
        self.measures_left = False
        check_fit(task, splits)
        if task.varies is None and task.held_out is not None:
            splits = replace(splits, validation=splits.validation.first(task.held_out))
        self.pools = {device: splits.to(device) for device in dict.fromkeys(way.devices)}
        self.example = splits.train.example()
        self._shared: dict[torch.device, Home] = {}
        if task.varies is None:
            self._share_homes()

    def _share_homes(self) -> None:
        """Place what all hosts of a device have in common."""
        flops = HostFlops.of_task(self.task.build_host, self.example)
        clock = self._clock(self.task, flops, next(iter(self.pools.values())))
        for device, pool in self.pools.items():
            self._shared[device] = Home(
                task=self.task,
                splits=_with_border(self.task, pool),
                flops=flops,
                clock=clock,
                is_compiled=self._is_compiled(self.task, flops),
            )

    def home(self, seed: int, device: torch.device) -> Home:
        """Return what the host of this seed is trained on."""
        if device in self._shared:
            return self._shared[device]
        task, splits, variation = for_host(self.task, seed, self.pools[device])
        flops = HostFlops.of_task(task.build_host, self.example)
        return Home(
            task=task,
            splits=_with_border(task, splits),
            flops=flops,
            clock=self._clock(task, flops, splits),
            is_compiled=self._is_compiled(task, flops),
            variation=variation,
        )

    def _is_compiled(self, task: Task, flops: HostFlops) -> bool:
        return is_compiled(self.way.compile, self.way.devices, flops.whole * task.batch)

    def _clock(self, task: Task, flops: HostFlops, splits: Splits) -> ComputeClock | None:
        if task.clock != "compute":
            return None
        clock = ComputeClock(task, flops, splits.train)
        clock.measures_left = self.measures_left
        return clock

    def build(self, seed: int, device: torch.device) -> HostRun:
        """Build the newborn host of this seed."""
        run = HostRun(self.home(seed, device), seed, device, self.way.amp)
        _price(run)
        return run

    def begin_episode(self, run: HostRun, seed: int) -> None:
        """Let a host be the newborn one of another seed.

        In a family its network, optimiser and examples are new; else it keeps its tensors.
        """
        if self.task.varies is None:
            run.begin_episode(seed)
            return
        run.move_in(self.home(seed, run.device), seed)
        _price(run)

    def measure_left(self, runs: Sequence[HostRun]) -> None:
        """Know that episodes end with a measurement without undecided seeds."""
        self.measures_left = True
        for run in runs:
            if run.clock is not None:
                run.clock.measures_left = True

    def widest_space(self, space: ActionSpace) -> ActionSpace:
        """Return the actions of every host that there can be, where this is one host's space.

        It has each slot that some host has.
        """
        if self.task.varies is None or self.task.varies.depth is None:
            return space
        modules = dict(space.slots.modules)
        first = self.task.varies.variation(0)
        for depth in self.task.varies.depth.whole_values():
            task = concrete(self.task, replace(first, depth=depth))
            other = build_network(task, 0, self.example).space
            if (other.blueprint_ids, other.blends) != (space.blueprint_ids, space.blends):
                raise SettingError(
                    f"task {self.task.name}: hosts of depth {depth} take the blueprints "
                    f"{other.blueprint_ids[1:]}, others {space.blueprint_ids[1:]}. Name those that "
                    "all take in the task's blueprints."
                )
            modules |= other.slots.modules
            slot_ids = other.slots.slot_ids
            if tuple(modules)[: len(slot_ids)] != slot_ids:
                raise SettingError(
                    f"task {self.task.name}: hosts of depth {depth} have the slots {slot_ids}, "
                    f"others {tuple(modules)}. Give deeper hosts theirs after those."
                )
        return replace(space, slots=SlotConfig(tuple(modules), modules))


def _with_border(task: Task, splits: Splits) -> Splits:
    """The splits with what augmentation needs."""
    return replace(splits, train=splits.train.with_border()) if task.augment else splits


def _price(run: HostRun) -> None:
    """Price a newborn host as it turns out to be, and refuse a budget below one decision."""
    if not run.has_segments:
        # no prefix is shared, so every counterfactual costs a whole pass
        run.flops.after.clear()
        run.flops.back.clear()
    if run.clock is not None:
        run.clock.plan(run)
