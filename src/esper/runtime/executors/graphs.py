"""Steps as captured CUDA graphs: one graph per host and call, replayed on a stream.

What a graph is right for is in `structure`; what a step does is in `host`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline.errors import NotCompiledError
from esper.runtime.counterfactuals import greedy_scores, measure
from esper.runtime.executors import compiling
from esper.runtime.executors.structure import Key, graph_key, kernel_parts
from esper.runtime.host import HostRun
from esper.runtime.splits import Split

# Most streams of a device that hosts take turns on. Each costs a pool of memory and workspaces of
# cuBLAS.
_LANES = 16
_TURN = 8  # Calls of one host that are launched before it is the next one's turn.
_SHARE = 0.5  # Part of a device's free memory that graphs may take where no setting says how much.
# Structures kept beside those that hosts are in or began in: a cull or a rollback brings one back.
_SPARE = 64


class _Captured:
    """A captured call.

    Its result is copied out of the pool, whose memory the next graph of the lane may overwrite.
    """

    def __init__(self, lane: "_Lane", call: Callable[[], Tensor | None], room: Tensor):
        before = _reserved(room.device)
        self.result = room[:0]
        self.graph = torch.cuda.CUDAGraph()
        self.stream = lane.stream
        self.stream.wait_stream(torch.cuda.current_stream())
        # backward passes in this thread: to wake torch's own for each of them takes longer
        with torch.cuda.stream(self.stream), torch.autograd.set_multithreading_enabled(False):
            # not `torch.cuda.graph`: it waits for all other hosts and gives their cached memory
            # back
            self.graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
            try:
                output = call()
                if output is not None:
                    self.result = room[: len(output)]
                    self.result.copy_(output)
            finally:
                self.graph.capture_end()
                lane.taken += _reserved(room.device) - before


def _reserved(device: torch.device) -> int:
    """Bytes that torch holds.

    Read from nested statistics: flattening all of them takes longer than a small capture.
    """
    return int(torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["current"])


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The streams of a device, the same for every population of the process.

    cuBLAS keeps its workspaces by stream and never frees them.
    """
    return [torch.cuda.Stream(device) for _ in range(_LANES)]


class _Lane:
    """A stream, and the one pool of all graphs that run on it.

    They run one after the other, so they may share memory. Nothing in the pool is needed after the
    graph that wrote it: all that stays, results too, lives outside.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()
        # bytes of the pool; it never gives any back before all of its graphs are gone
        self.taken = 0
        with torch.cuda.device(device):
            room = torch.zeros(1, device=device)
            # never replayed: a pool without a single graph may not be captured into again
            self._anchor = _Captured(self, lambda: room + 1, room)


class _DeviceGraphs:
    """The lanes of one device, the hosts assigned to them, and all graphs of these hosts."""

    def __init__(self, device: torch.device, most: int | None = None):
        # pools of populations that are gone: a capture that runs out of memory could not give them
        # back
        torch.cuda.empty_cache()
        self.device = device
        # bytes that all pools together may take; a single one takes what it needs
        self.most = int(_SHARE * torch.cuda.mem_get_info(device)[0]) if most is None else most
        self._open = len(_streams(device))
        self._lanes: list[_Lane] = []
        self._lane_of: dict[HostRun, _Lane] = {}
        # structures in which hosts' episodes begin
        self._first: dict[HostRun, tuple[HostRun, Key]] = {}
        # by structure and name; last used is last
        self._kept: dict[tuple[HostRun, Key], dict[str, _Captured]] = {}

    @property
    def taken(self) -> int:
        """Bytes of all pools together."""
        return sum(lane.taken for lane in self._lanes)

    def lane(self, run: HostRun) -> _Lane:
        """Return the lane of a host.

        Hosts take lanes in turn, in the order in which they come. One more is opened if memory
        allows.
        """
        if run not in self._lane_of:
            largest = max((lane.taken for lane in self._lanes), default=0)
            if len(self._lanes) < self._open and (
                not self._lanes or self.taken + largest <= self.most
            ):
                self._lanes.append(_Lane(self.device, _streams(self.device)[len(self._lanes)]))
                self._lane_of[run] = self._lanes[-1]
            else:
                hosts = Counter(self._lane_of.values())
                self._lane_of[run] = min(self._lanes, key=hosts.__getitem__)
        return self._lane_of[run]

    def keep_within(self) -> None:
        """Begin again with fewer pools if all together are too large.

        Every graph is captured again when needed.
        """
        if self.taken > self.most and len(self._lanes) > 1:
            self._open = max(1, self.most // max(lane.taken for lane in self._lanes))
            torch.cuda.synchronize(self.device)
            for kept in (self._kept, self._lane_of, self._lanes):
                kept.clear()
            torch.cuda.empty_cache()

    def graphs(self, run: HostRun) -> dict[str, _Captured]:
        """Return the graphs that the structure of this host has so far, by name."""
        key = run, graph_key(run)
        self._first.setdefault(run, key)
        graphs = self._kept.pop(key, {})
        self._kept[key] = graphs
        return graphs

    def drop_spare(self) -> None:
        """Delete, of too many structures, those that were used least lately."""
        if len(self._kept) <= _SPARE:
            return
        needed = {*self._first.values(), *((run, graph_key(run)) for run in self._first)}
        for key in [key for key in self._kept if key not in needed][:-_SPARE]:
            del self._kept[key]

    def drop_episode(self, run: HostRun) -> None:
        """Delete every structure of this host but its first."""
        for key in [key for key in self._kept if key[0] is run and key != self._first[run]]:
            del self._kept[key]


class _Measured(NamedTuple):
    """A measurement that a lane was given: where its result will be, and its end."""

    result: Tensor
    end: torch.cuda.Event


class GraphedExecutor:
    """Replays one graph per host and call on the host's lane.

    Only a change of structure captures again. `graph_memory` is in GiB per device.
    """

    def __init__(self, graph_memory: float | None = None) -> None:
        self._most = None if graph_memory is None else int(graph_memory * 2**30)
        self._devices: dict[torch.device, _DeviceGraphs] = {}
        self._warmed: set[Hashable] = set()
        self._trained: dict[HostRun, torch.cuda.Event] = {}  # ends of their last training
        # measurements that were promised
        self._measured: dict[HostRun, _Measured] = {}

    def train(self, runs: Sequence[HostRun], *, then_measure: bool = False) -> list[Tensor]:
        """Train every host for one epoch, as `EagerExecutor.train` does, in turn.

        Hosts that need new graphs come last: others train behind their capture.
        """
        self.settle(runs)
        graphs = {run: self._device(run).graphs(run) for run in runs}
        ready = [run for run in runs if "measure" in graphs[run]]  # which is captured last
        changed = [run for run in runs if run not in ready]
        # drawing overlaps with first steps of those before
        calls = [self._begin(run, graphs[run], 2) for run in ready]
        self._replay([host_calls[2:] for host_calls in calls])
        self._end_training(ready, graphs, then_measure)
        for run in changed:
            self._begin(run, graphs[run], None)
            self._capture_measure(run, run.splits.validation)
        self._end_training(changed, graphs, then_measure)
        scores = [graphs[run]["score"].result for run in runs]
        for container in (calls, graphs):  # or they would hold what is to be given back
            container.clear()
        if not then_measure:
            self._tidy()
        return scores

    def _begin(
        self, run: HostRun, graphs: dict[str, _Captured], count: int | None
    ) -> list[_Captured]:
        """Draw an epoch and start its first `count` calls.

        Returns all of them: the greedy score, then every step.
        """
        run.begin_epoch(clears=False)
        if "train" not in graphs:
            # every epoch's first graph
            self._captured(run, "score", lambda: greedy_scores(run.clear()))
            self._captured(run, "train", lambda: run.learn(*run.plan.next_batch()))
        calls = [graphs["score"], *[graphs["train"]] * run.plan.steps]
        calls[0].stream.wait_stream(torch.cuda.current_stream(run.device))
        self._replay([calls[:count]])
        return calls

    def _end_training(
        self, runs: Sequence[HostRun], graphs: dict[HostRun, Any], then_measure: bool
    ) -> None:
        """Note where the training of these hosts ends.

        The measurement that was promised continues behind it.
        """
        self._trained |= self._ends(runs)
        if then_measure:
            calls = [graphs[run]["measure"] for run in runs]
            self._replay([[call] for call in calls])
            ends = self._ends(runs)
            self._measured |= {
                run: _Measured(result=call.result, end=ends[run])
                for run, call in zip(runs, calls, strict=True)
            }

    def _ends(self, runs: Sequence[HostRun]) -> dict[HostRun, torch.cuda.Event]:
        """The present end of what each host's lane has been given.

        Hosts that come later do not move it.
        """
        lanes = {run: self._device(run).lane(run) for run in runs}
        ends = {lane: lane.stream.record_event() for lane in dict.fromkeys(lanes.values())}
        return {run: ends[lane] for run, lane in lanes.items()}

    def wait(self, runs: Sequence[HostRun]) -> None:
        """Let all later work on the device come after the last training of these hosts."""
        for run in runs:
            torch.cuda.current_stream(run.device).wait_event(self._trained[run])

    def settle(self, runs: Sequence[HostRun]) -> None:
        """Let all later work on the device come after everything that these hosts were given.

        A measurement that was promised and not taken is dropped.
        """
        self.wait([run for run in runs if run in self._trained])
        for run in [run for run in runs if run in self._measured]:
            torch.cuda.current_stream(run.device).wait_event(self._measured.pop(run).end)

    def _replay(self, calls: Sequence[Sequence[_Captured]]) -> None:
        """A few calls of each host in turn: a deep queue of one host would keep others out."""
        for start in range(0, max(map(len, calls), default=0), _TURN):
            for turn in filter(None, (host_calls[start : start + _TURN] for host_calls in calls)):
                with torch.cuda.stream(turn[0].stream):  # which takes longer than a launch
                    for call in turn:
                        call.graph.replay()

    def measure(self, runs: Sequence[HostRun], splits: Sequence[Split]) -> list[Tensor]:
        """Measure each host on its split; a promised measurement is taken as it is."""
        due = [
            (run, split)
            for run, split in zip(runs, splits, strict=True)
            if run not in self._measured
        ]
        calls = [self._capture_measure(run, split) for run, split in due]
        for call, (run, _) in zip(calls, due, strict=True):
            call.stream.wait_stream(torch.cuda.current_stream(run.device))
        self._replay([[call] for call in calls])
        ends = self._ends([run for run, _ in due])
        measured = {
            run: _Measured(result=call.result, end=ends[run])
            for call, (run, _) in zip(calls, due, strict=True)
        }
        results = []
        for run in runs:
            result, end = measured[run] if run in measured else self._measured.pop(run)
            # as must those who get a dropped result's memory
            torch.cuda.current_stream(run.device).wait_event(end)
            results.append(result)
        calls.clear()
        self._tidy()
        return results

    def begin_episode(self, run: HostRun) -> None:
        """Forget the structures with seeds of the episode before, which never come back."""
        self._device(run).drop_episode(run)

    def _device(self, run: HostRun) -> _DeviceGraphs:
        """All graphs of the device that this host trains on."""
        if run.device not in self._devices:
            self._devices[run.device] = _DeviceGraphs(run.device, self._most)
        return self._devices[run.device]

    def _captured(self, run: HostRun, name: str, call: Callable[[], Tensor | None]) -> _Captured:
        """The graph of this name that the host's structure has, captured if there is none yet."""
        graphs = self._device(run).graphs(run)
        if name not in graphs:
            with torch.cuda.device(run.device):
                graphs[name] = self._warmed_up(run, name, call)
        return graphs[name]

    def _capture_measure(self, run: HostRun, split: Split) -> _Captured:
        """The graph that measures a host with and without each seed in the output.

        Only probation needs the latter, and then needs no new graph.
        """
        ablated = [slot for slot in run.slots if slot.seed is not None and slot.is_in_output]
        return self._captured(run, "measure", partial(measure, run, split, ablated))

    def _warmed_up(self, run: HostRun, name: str, call: Callable[[], Tensor | None]) -> _Captured:
        """Capture a call.

        What never ran before is run first, and a host that learnt from it is put back to where it
        was.
        """
        lane = self._device(run).lane(run)
        parts = {(name, run.device, run.amp, part) for part in kernel_parts(run)}
        if parts <= self._warmed:
            # these parts are known, but maybe not with each other's outputs
            with suppress(NotCompiledError):
                return _capture(run, lane, call)
        self._warmed |= parts
        # a capture that was given up may have left some in its pool
        run.optimizer.zero_grad(set_to_none=True)
        # cleared, so that the cursor has examples
        snapshot = run.clear().snapshot() if name == "train" else None
        # not on the host's lane: what every lane's stream once needed for this would stay reserved
        # for it
        call()
        if snapshot is not None:
            run.restore(snapshot)
        return _capture(run, lane, call)

    def _tidy(self) -> None:
        """Delete graphs that are not needed, and pools if they take too much memory."""
        for graphs in self._devices.values():
            graphs.drop_spare()
            graphs.keep_within()


def _capture(run: HostRun, lane: _Lane, call: Callable[[], Tensor | None]) -> _Captured:
    """Capture a call of a host on its lane; a compiled host may compile nothing new there."""
    run.optimizer.zero_grad(set_to_none=True)
    # as `measure` fills
    room = torch.zeros(2 + 2 * len(run.slots), dtype=torch.double, device=run.device)
    with compiling.nothing_new() if run.is_compiled else nullcontext():
        return _Captured(lane, call, room)
