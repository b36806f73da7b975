"""Two ways to run the same steps: eagerly (any device, the reference) and as one captured CUDA graph per host."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.kasmina.slot import has_gate
from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.batches import SharedBatchIterator
from esper.runtime.counterfactuals import greedy_scores, measure
from esper.runtime.host import AMP_TYPES, HostRun, draws_random_numbers
from esper.runtime.splits import Split
from esper.runtime.tasks import Task


class Executor(Protocol):
    """Trains and measures hosts; results stay on the devices until the caller reads them."""

    def train(self, runs: Sequence[HostRun]) -> list[Tensor]:
        """One epoch of every host; returns the greedy scores of its slots, read off before the first step."""
        ...

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]: ...

    def begin_episode(self, run: HostRun) -> None:
        """A host is newborn, in the tensors of the one before."""
        ...


class EagerExecutor:
    """Step by step in Python, one gather for all hosts of a device. Every other executor must equal it bit for bit."""

    def train(self, runs: Sequence[HostRun]) -> list[Tensor]:
        for run in runs:
            run.begin_epoch()
        scores = [greedy_scores(run) for run in runs]
        for device in dict.fromkeys(run.device for run in runs):
            own = [run for run in runs if run.device == device]
            for inputs, targets in SharedBatchIterator([run.plan for run in own]):
                for index, run in enumerate(own):
                    run.learn(inputs[index], targets[index])
        return scores

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]:
        return [measure(run, split) for run, split in zip(runs, splits, strict=True)]

    def begin_episode(self, run: HostRun) -> None:
        """Nothing is remembered."""


_TRAIN = "train"
_KEPT = 8
"""Structures of a host whose graphs are kept: a culled seed brings an earlier one back."""


class _Captured:
    """A captured call and the tensor it leaves its result in."""

    def __init__(self, lane: "_Lane", call: Callable[[], Tensor | None]):
        self.graph = torch.cuda.CUDAGraph()
        lane.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane.stream):
            # not `torch.cuda.graph`: it waits for all other hosts and gives their cached memory back
            self.graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
            try:
                self.result = call()
            finally:
                self.graph.capture_end()


class _Lane:
    """One host's stream, and the memory that its graphs share: they run one after the other."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[Any, dict[str, _Captured]] = {}
        """by structure and name; the first structure, in which episodes begin, stays"""

    def of(self, structure: Any) -> dict[str, _Captured]:
        """The graphs of this structure so far; of too many others those that were used least lately go."""
        if structure == next(iter(self.graphs), None):
            return self.graphs[structure]
        if structure not in self.graphs and len(self.graphs) >= _KEPT:
            del self.graphs[list(self.graphs)[1]]
        self.graphs[structure] = found = self.graphs.pop(structure, {})
        return found


class GraphedExecutor:
    """One graph per host and call, replayed on the host's own stream. Only a change of structure captures again."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._warmed: set[Any] = set()

    def train(self, runs: Sequence[HostRun]) -> list[Tensor]:
        """Steps of all hosts in turn. Those that need new graphs come last, behind whose capture others train."""
        ready = [run for run in runs if self._is_ready(run)]
        changed = [run for run in runs if run not in ready]
        calls = [self._begin(run, 2) for run in ready]  # drawing examples overlaps with the first steps of those before
        self._replay(ready, [own[2:] for own in calls])
        for run in changed:
            self._begin(run, None)
            self._captured(run, "measure", partial(measure, run, run.splits.validation))
        self._join(runs)
        return [result for run in runs if (result := self._graphs(run)["score"].result) is not None]

    def _begin(self, run: HostRun, count: int | None) -> list[_Captured]:
        """Draw an epoch and start its first calls; returns all of them."""
        run.begin_epoch()
        calls = self._epoch_calls(run)
        self._lane(run).stream.wait_stream(torch.cuda.current_stream(run.device))
        self._replay([run], [calls[:count]])
        return calls

    def _epoch_calls(self, run: HostRun) -> list[_Captured]:
        """The greedy score, then every step of the epoch."""
        # captured first: what is captured later cannot write over a result that is read after it
        score = self._captured(run, "score", partial(greedy_scores, run))
        step = self._captured(run, _TRAIN, lambda: run.learn(*run.plan.next_batch()))
        return [score, *[step] * run.plan.steps]

    def _replay(self, runs: Sequence[HostRun], calls: Sequence[Sequence[_Captured]]) -> None:
        """Each host's calls on its stream, one of each in turn: a deep queue of one host would keep others out."""
        for row in zip_longest(*calls):
            for run, call in zip(runs, row, strict=True):
                if call is not None:
                    with torch.cuda.stream(self._lane(run).stream):
                        call.graph.replay()

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]:
        calls = [
            self._captured(run, "measure", partial(measure, run, split))
            for run, split in zip(runs, splits, strict=True)
        ]
        for run in runs:
            self._lane(run).stream.wait_stream(torch.cuda.current_stream(run.device))
        self._replay(runs, [[call] for call in calls])
        self._join(runs)
        return [call.result for call in calls if call.result is not None]

    def begin_episode(self, run: HostRun) -> None:
        """Structures with seeds of the episode before never come back."""
        graphs = self._lane(run).graphs
        for structure in list(graphs)[1:]:
            del graphs[structure]

    def _graphs(self, run: HostRun) -> dict[str, _Captured]:
        return self._lane(run).of(run.topology())

    def _is_ready(self, run: HostRun) -> bool:
        return "measure" in self._graphs(run)  # captured last

    def _captured(self, run: HostRun, name: str, call: Callable[[], Tensor | None]) -> _Captured:
        lane, graphs = self._lane(run), self._graphs(run)
        if name not in graphs:
            with torch.cuda.device(run.device):
                self._warm_up(run, name, lane, call)
                run.optimizer.zero_grad(set_to_none=True)
                graphs[name] = _Captured(lane, call)
        return graphs[name]

    def _warm_up(self, run: HostRun, name: str, lane: _Lane, call: Callable[[], Tensor | None]) -> None:
        """Run what has kernels that never ran before; a host that learnt from it is put back to where it was."""
        is_learning = name == _TRAIN
        parts = {(name, run.device, run.amp, part) for part in _parts(run)}
        if parts <= self._warmed:
            return
        self._warmed |= parts
        snapshot = run.snapshot() if is_learning else None
        sums, cursor = run.sums.clone(), run.plan.cursor.clone()
        lane.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane.stream):
            call()
        if snapshot is not None:
            torch.cuda.current_stream().wait_stream(lane.stream)
            run.restore(snapshot)
            run.sums.copy_(sums)
            run.plan.cursor.copy_(cursor)

    def _lane(self, run: HostRun) -> _Lane:
        if id(run) not in self._lanes:
            self._lanes[id(run)] = _Lane(run.device)
        return self._lanes[id(run)]

    def _join(self, runs: Sequence[HostRun]) -> None:
        for run in runs:
            torch.cuda.current_stream(run.device).wait_stream(self._lane(run).stream)


def _parts(run: HostRun) -> set[Any]:
    """What decides which kernels a host runs, piece by piece: the host itself and what sits in each slot."""
    parts: set[Any] = {run.task.name}
    for place, slot in enumerate(run.slots):
        parts |= {(place, name, has_gate(fossil)) for name, fossil in zip(slot.fossil_names, slot.fossils, strict=True)}
        if slot.seed is not None:
            parts.add((place, slot.state.blueprint_id, has_gate(slot.seed), slot.is_in_output))
    return parts


def find_eager_only(task: Task, amp: str) -> str | None:
    """What about this task a captured graph could not do right; None if nothing."""
    if amp == "fp16":
        return "amp fp16 with its scaler"
    if task.lengths.training > 0:
        return "the shadow pass of TRAINING seeds"
    with torch.device("meta"):
        host = task.build_host()
    return "a host with dropout" if draws_random_numbers(host) else None


def refuse_impossible(executor: str, amp: str, devices: Sequence[str], task: Task) -> None:
    """What fp16 and captured graphs cannot do. Configurations and populations ask here, before any work."""
    for kind, name, known in (("amp", amp, AMP_TYPES), ("executor", executor, ("auto", "eager", "graphed"))):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    on_cpu = [device for device in devices if not device.startswith("cuda")]
    if amp == "fp16" and on_cpu:
        raise SettingError(f"amp fp16 needs CUDA devices, got {', '.join(on_cpu)}; on a CPU use bf16 or off.")
    if executor != "graphed":
        return
    if on_cpu:
        raise SettingError(f"executor graphed needs CUDA devices, got {', '.join(on_cpu)}; choose eager or auto.")
    if (eager_only := find_eager_only(task, amp)) is not None:
        raise SettingError(f"{eager_only} runs on the eager executor only; choose executor eager or auto.")


def choose_executor(name: str, amp: str, devices: Sequence[torch.device], task: Task) -> Executor:
    """`auto` is graphed where every device is a GPU and nothing needs the eager one."""
    refuse_impossible(name, amp, [str(device) for device in devices], task)
    on_gpu = all(device.type == "cuda" for device in devices)
    is_graphed = name == "graphed" or (name == "auto" and on_gpu and find_eager_only(task, amp) is None)
    return GraphedExecutor() if is_graphed else EagerExecutor()
