"""Two ways to run the same steps: eagerly (any device, the reference) and as one captured CUDA graph per host."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.kasmina.slot import has_gate
from esper.leyline.errors import SettingError
from esper.runtime.batches import SharedBatchIterator
from esper.runtime.host import HostRun, draws_random_numbers
from esper.runtime.measuring import greedy_scores, measure
from esper.runtime.splits import Split
from esper.runtime.tasks import Task


class Executor(Protocol):
    """Trains and measures hosts; results stay on the devices until the caller reads them."""

    def train(self, runs: Sequence[HostRun]) -> list[Tensor]:
        """One epoch of every host; returns the greedy scores of its slots, read off before the first step."""
        ...

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]: ...

    def forget(self, run: HostRun) -> None: ...


class EagerExecutor:
    """Step by step in Python, one gather for all hosts of a device. Every other executor must equal it bit for bit."""

    def train(self, runs: Sequence[HostRun]) -> list[Tensor]:
        for run in runs:
            run.begin_epoch()
        scores = [greedy_scores(run) for run in runs]
        for device in dict.fromkeys(run.device for run in runs):
            own = [run for run in runs if run.device == device]
            for inputs, targets in SharedBatchIterator([run.plan for run in own], own[0].task.batch):
                for index, run in enumerate(own):
                    run.learn(inputs[index], targets[index])
        return scores

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]:
        return [measure(run, split) for run, split in zip(runs, splits, strict=True)]

    def forget(self, run: HostRun) -> None:
        """Nothing is remembered."""


class _Captured:
    """A captured call and the tensor it leaves its result in."""

    def __init__(self, run: HostRun, stream: torch.cuda.Stream, call: Callable[[], Tensor | None], warm: bool):
        self.graph = torch.cuda.CUDAGraph()
        if warm:
            snapshot = run.snapshot()
            sums, cursor = run.sums.clone(), run.plan.cursor.clone()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.current_stream().wait_stream(stream)
            run.restore(snapshot)
            run.sums.copy_(sums)
            run.plan.cursor.copy_(cursor)
        run.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.result = call()


class GraphedExecutor:
    """One graph per host and call, replayed on the host's own stream. Only a change of structure captures again."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._graphs: dict[int, tuple[tuple[Any, ...], dict[str, _Captured]]] = {}
        self._warmed: set[Any] = set()

    def train(self, runs: Sequence[HostRun]) -> list[Tensor]:
        """Steps of all hosts in turn; drawing one host's examples overlaps with the first step of those before it."""
        scores, calls = [], []
        for run in runs:
            run.begin_epoch()
            score = self._captured(run, "score", partial(greedy_scores, run))
            assert score.result is not None
            scores.append(score.result)
            full, rest = divmod(run.examples, run.task.batch)
            sizes = [run.task.batch] * full + [rest] * (rest > 0)
            steps = [self._captured(run, f"train {size}", _train_call(run, size)) for size in sizes]
            calls.append([score, *steps])
            self._stream(run).wait_stream(torch.cuda.current_stream(run.device))
            self._replay([run], [[score, steps[0]]])
        self._replay(runs, [own[2:] for own in calls])
        self._join(runs)
        return scores

    def _replay(self, runs: Sequence[HostRun], calls: Sequence[Sequence[_Captured]]) -> None:
        """Each host's calls on its stream, one of each in turn: a deep queue of one host would keep others out."""
        for row in zip_longest(*calls):
            for run, call in zip(runs, row, strict=True):
                if call is not None:
                    with torch.cuda.stream(self._stream(run)):
                        call.graph.replay()

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]:
        calls = [
            self._captured(run, "measure", partial(measure, run, split))
            for run, split in zip(runs, splits, strict=True)
        ]
        for run in runs:
            self._stream(run).wait_stream(torch.cuda.current_stream(run.device))
        self._replay(runs, [[call] for call in calls])
        self._join(runs)
        return [call.result for call in calls if call.result is not None]

    def forget(self, run: HostRun) -> None:
        """Drop the graphs of a host that was built anew."""
        self._graphs.pop(id(run), None)
        self._streams.pop(id(run), None)

    def _captured(self, run: HostRun, name: str, call: Callable[[], Tensor | None]) -> _Captured:
        topology = run.topology()
        known = self._graphs.get(id(run))
        if known is None or known[0] != topology:
            known = (topology, {})
            self._graphs[id(run)] = known
        if name not in known[1]:
            shape = (name, run.device, *_structure(run))
            with torch.cuda.device(run.device):
                known[1][name] = _Captured(run, self._stream(run), call, warm=shape not in self._warmed)
            self._warmed.add(shape)
        return known[1][name]

    def _stream(self, run: HostRun) -> torch.cuda.Stream:
        if id(run) not in self._streams:
            self._streams[id(run)] = torch.cuda.Stream(run.device)
        return self._streams[id(run)]

    def _join(self, runs: Sequence[HostRun]) -> None:
        for run in runs:
            torch.cuda.current_stream(run.device).wait_stream(self._stream(run))


def _train_call(run: HostRun, batch: int) -> Callable[[], None]:
    return lambda: run.learn(*run.plan.next_batch(batch))


def _structure(run: HostRun) -> tuple[Any, ...]:
    """What decides which kernels a host runs; hosts alike in this need no warm-up of their own."""
    return tuple(
        (
            *((name, has_gate(fossil)) for name, fossil in zip(slot.fossil_names, slot.fossils, strict=True)),
            (slot.state.blueprint_id, has_gate(slot.seed), slot.is_in_output) if slot.seed is not None else None,
        )
        for slot in run.slots
    )


def find_eager_only(task: Task, amp: str) -> str | None:
    """What about this task a captured graph could not do right; None if nothing."""
    if amp == "fp16":
        return "fp16 with its scaler"
    if task.lengths.training > 0:
        return "the shadow pass of TRAINING seeds"
    with torch.device("meta"):
        host = task.build_host()
    return "a host with dropout" if draws_random_numbers(host) else None


def choose_executor(name: str, devices: Sequence[torch.device], eager_only: str | None) -> Executor:
    """`auto` is graphed where every device is a GPU and nothing needs the eager one."""
    on_gpu = all(device.type == "cuda" for device in devices)
    match name:
        case "auto":
            return GraphedExecutor() if on_gpu and eager_only is None else EagerExecutor()
        case "eager":
            return EagerExecutor()
        case "graphed":
            if not on_gpu:
                raise SettingError(f"the graphed executor needs CUDA devices, got {', '.join(map(str, devices))}.")
            if eager_only is not None:
                raise SettingError(f"{eager_only} runs on the eager executor only; choose executor eager or auto.")
            return GraphedExecutor()
        case _:
            raise SettingError(f"unknown executor {name!r}. Known: auto, eager, graphed.")
