"""N growing hosts that train side by side and know nothing of each other.

The caller decides about the order of calls.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.harvesting import harvest
from esper.kasmina.pricing import HostFlops
from esper.kasmina.pruning import FossilVerdict, find_judged, prune
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import DataError, DeviceError, SettingError
from esper.leyline.factored_actions import Choice
from esper.leyline.gates import Measurement
from esper.leyline.legality import GrowthView
from esper.leyline.reports import SeedStateReport
from esper.leyline.settings import SlotChange
from esper.runtime.charges import (
    evaluation_charges,
    network_flops,
    score_charges,
    training_charges,
)
from esper.runtime.clock import ComputeClock
from esper.runtime.counterfactuals import incubated_slots, measured_slots, score_examples
from esper.runtime.devices import map_hosts, parse_devices
from esper.runtime.executors.choosing import choose_executor
from esper.runtime.executors.compiling import compiled_so_far, is_compiled
from esper.runtime.governor import NEWBORN, Governor, keep_together
from esper.runtime.host import EpochReading, HostRun
from esper.runtime.ledger import Charge
from esper.runtime.splits import Split, Splits
from esper.runtime.tasks.task import Task, check_fit


@dataclass(frozen=True)
class Rollback:
    """A host that was rolled back, and why."""

    host: int
    reason: str
    changes: tuple[SlotChange, ...]  # live seeds that were culled


@dataclass(frozen=True)
class FinalScore:
    """Scores of one host's harvested network on the test split.

    `validation_accuracy` is the one by which to choose between networks.
    """

    accuracy: float
    loss: float
    validation_accuracy: float
    params: int
    network: torch.nn.Module


@dataclass
class Told:
    """What all parts of a population know:

    how far clock and compiler are accounted for, and whether it has ended.
    """

    seconds: float = 0.0
    compiled: tuple[int, float] = (0, 0.0)
    is_over: bool = False  # whether the test split has been read


class Population:
    """Hosts by index. `train_epoch`, `evaluate`, `apply`, `tick` make one epoch of all of them."""

    def __init__(
        self,
        task: Task,
        seeds: Sequence[int],
        devices: Sequence[str] = ("cpu",),
        *,
        executor: str = "auto",
        amp: str = "off",
        compile: str = "auto",
        graph_memory: float | None = None,
        data_root: Path | None = None,
        splits: Splits | None = None,
    ):
        parsed = parse_devices(devices)
        self.placed = map_hosts(len(seeds), parsed)
        self.task = task
        self.amp = amp
        self.executor = choose_executor(executor, amp, parsed, task, graph_memory)
        splits = splits or task.load(data_root)
        check_fit(task, splits)
        if task.held_out is not None:
            splits = replace(splits, validation=splits.validation.first(task.held_out))
        on_device = {device: splits.to(device) for device in dict.fromkeys(self.placed)}
        if task.augment:
            on_device = {
                device: replace(placed, train=placed.train.with_border())
                for device, placed in on_device.items()
            }
        self.flops = HostFlops.of_task(task.build_host, splits.train.example())
        self.clock = (
            ComputeClock(task, self.flops, splits.train) if task.clock == "compute" else None
        )
        self.corpus = splits.corpus
        with memory_errors():
            compiled = is_compiled(compile, parsed, self.flops.whole * task.batch)
            placed = zip(seeds, self.placed, strict=True)
            most = None if self.clock is None else self.clock.most_steps
            self.runs = [
                HostRun(task, on_device[device], seed, device, amp, compiled, most)
                for seed, device in placed
            ]
            self.governors = [Governor(run) for run in self.runs]
        self.told = Told(compiled=compiled_so_far())
        self._scores: list[torch.Tensor] = []  # of the epoch that was started
        if not self.runs[0].has_segments:
            # no prefix is shared, so every counterfactual costs a whole pass
            self.flops.after.clear()
            self.flops.back.clear()
        if self.clock is not None:
            self.clock.plan(self.runs[0])  # a budget below one decision is refused here

    def describe(self, tell: Callable[[str], None]) -> None:
        """Tell what an episode may cost and what it rests on, where that is not plain from the
        settings.
        """
        for known in filter(None, (self.clock, self.corpus and f"corpus: {self.corpus}")):
            tell(str(known))

    def part(self, hosts: range) -> "Population":
        """Return some of the hosts, with everything else in common.

        Parts train at the same time, each with its own calls.
        """
        part = copy.copy(self)
        for name in ("placed", "runs", "governors"):
            setattr(part, name, getattr(self, name)[hosts.start : hosts.stop])
        return part

    def train_epoch(self, *, then_evaluate: bool = False) -> list[EpochReading]:
        """Every host trains on the next examples of its own stream; one read per device at the end.

        `then_evaluate` promises that `evaluate()` comes next and nothing in between, so that
        devices may begin with it.
        """
        self.start_epoch(then_evaluate=then_evaluate)
        return self.finish_epoch()

    def start_epoch(self, *, then_evaluate: bool = False) -> None:
        """Give an epoch to the devices, which continue by themselves.

        `finish_epoch` waits for it.
        """
        self._require_episode()
        if self.clock is not None:
            for run in self.runs:
                self.clock.plan(run)
        self._started = _clock()
        # the caller may have switched gradients off
        with memory_errors(), torch.enable_grad():
            self._scores = self.executor.train(self.runs, then_measure=then_evaluate)

    def finish_epoch(self) -> list[EpochReading]:
        """Wait for the epoch that was started, and return its readings."""
        if not self._scores:
            raise SettingError(
                "finish_epoch() needs an epoch to wait for; call start_epoch() first."
            )
        with memory_errors():
            self.executor.wait(self.runs)
            sums = _read([run.sums for run in self.runs])
            scores = _read(self._scores)
        self._scores = []
        seconds = self._take_seconds(self._started)
        for run, row, score in zip(self.runs, sums, scores, strict=True):
            run.end_epoch(row)
            for slot, value in zip(
                run.slots if run.plan.steps else (), score, strict=bool(run.plan.steps)
            ):
                # without a step none were drawn, and the last score still holds
                slot.set_plain(greedy_score=value)
            charges = training_charges(run, self.flops, run.plan.examples) + score_charges(
                run, self.flops
            )
            run.ledger.settle(charges, seconds)
            run.ledger.peak_params = max(run.ledger.peak_params, run.model.total_params)
        return [reading for reading in self.readings() if reading is not None]

    def mark_charged(self) -> None:
        """What has been timed until now is in somebody's ledger, and is no other part's."""
        self.told.seconds = _clock()

    def _take_seconds(self, started: float) -> float:
        """Each host's part of the time since then that no other part of the population has been
        charged with.
        """
        now = _clock()
        seconds, self.told.seconds = now - max(started, self.told.seconds), now
        return seconds / len(self.runs)

    def evaluate(self) -> list[Rollback]:
        """Measure held-out loss, accuracy and what seeds on probation contribute.

        Hosts that broke are rolled back.
        """
        self._require_episode()
        started = _clock()
        with memory_errors():
            results = _read(
                self.executor.measure(self.runs, [run.splits.validation for run in self.runs])
            )
        seconds = self._take_seconds(started)
        rollbacks = []
        healthy = []
        for host, (run, governor, row) in enumerate(
            zip(self.runs, self.governors, results, strict=True)
        ):
            run.ledger.settle(evaluation_charges(run, self.flops), seconds)
            if run.reading is None:
                raise SettingError("evaluate() needs an epoch to judge; call train_epoch() first.")
            run.reading = replace(run.reading, held_out_loss=row[0], held_out_accuracy=row[1])
            problem = governor.judge(run.reading)
            if problem is not None:
                rollbacks.append(Rollback(host, problem, tuple(governor.roll_back())))
            else:
                self._take_evidence(run, row[2:])
                healthy.append(governor)
        keep_together(healthy)
        return rollbacks

    def _take_evidence(self, run: HostRun, row: list[float]) -> None:
        measured = measured_slots(run)
        incubated = incubated_slots(run)
        count = len(run.splits.validation)
        assert row or not (measured or incubated)
        for slot, mean, error in zip(run.slots if row else (), row[::2], row[1::2], strict=True):
            if slot in measured:  # numbers of other slots are not used, and may be anything
                slot.assign(slot.state.measured(Measurement(mean, error, count)))
            elif slot in incubated:
                slot.assign(slot.state.incubated(Measurement(mean, error, count)))

    def prune(self, host: int) -> list[FossilVerdict]:
        """Remove from a measured host the fossils that do not pay.

        It does so once per episode, when the rate has fallen.
        """
        run = self.runs[host]
        governor = self.governors[host]
        is_due = (
            run.model.settings.prunes and not run.is_pruned and self.task.is_rate_low(run.epoch)
        )
        # a host under suspicion is judged when it has recovered
        if not is_due or governor.bad_checks:
            return []
        run.is_pruned = True
        if not find_judged(run.model):
            return []
        started = time.perf_counter()
        charges: list[Charge] = []
        split = run.splits.validation

        def measure() -> torch.Tensor:
            whole = network_flops(run.model, self.flops)
            charges.append(Charge("counterfactual", len(split), whole))
            return score_examples(run, split)

        with memory_errors():
            verdicts, scored = prune(run.model, measure, measure())
        run.ledger.settle(charges, time.perf_counter() - started)
        self.mark_charged()
        if not all(verdict.is_kept for verdict in verdicts):
            assert run.reading is not None
            loss, accuracy = scored.mean(1).tolist()
            run.reading = replace(run.reading, held_out_loss=loss, held_out_accuracy=accuracy)
            governor.keep()  # a rollback brings nothing back that was removed
        return verdicts

    def apply(self, host: int, choice: Choice) -> list[SlotChange]:
        """Carry out one decision; an illegal one raises its refusal and changes nothing."""
        self._require_episode()
        run = self.runs[host]
        changes = run.model.act(choice)
        run.prime()
        return changes

    def tick(self) -> list[list[SlotChange]]:
        """Let every host's seeds grow older by an epoch; returns what changed, by host."""
        return [run.model.tick() for run in self.runs]

    def take_compiled(self) -> tuple[int, float]:
        """Shapes of blocks that were compiled since the last call, and the seconds it took."""
        before_shapes, before_seconds = self.told.compiled
        self.told.compiled = compiled_so_far()
        shapes, seconds = self.told.compiled
        return shapes - before_shapes, seconds - before_seconds

    def progress(self, host: int) -> float:
        """The share of a host's episode that is over: of its epochs, or of its compute."""
        run = self.runs[host]
        return (
            run.epoch / self.task.epochs
            if self.clock is None
            else run.ledger.flops / self.clock.budget
        )

    def readings(self) -> list[EpochReading | None]:
        """Return the last epoch's reading of every host."""
        return [run.reading for run in self.runs]

    def reports(self) -> list[dict[str, SeedStateReport]]:
        """Return the reports of every host's slots, by slot id."""
        return [run.model.get_slot_reports() for run in self.runs]

    def views(self) -> list[GrowthView]:
        """What legality and masks are judged by."""
        return [run.model.view() for run in self.runs]

    def snapshot(self) -> list[dict[str, Any]]:
        """Return everything that decides how each host continues."""
        return [
            {**governor.run.snapshot(), "governor": governor.state()} for governor in self.governors
        ]

    def restore(self, snapshots: Sequence[dict[str, Any]]) -> None:
        """Put every host back to its snapshot, in place."""
        self.executor.settle(self.runs)
        for governor, snapshot in zip(self.governors, snapshots, strict=True):
            governor.run.restore(snapshot)
            governor.load(snapshot["governor"])

    def reset(self, host: int, seed: int) -> None:
        """A new episode in this place; all other hosts are untouched."""
        self.executor.settle([self.runs[host]])
        self.runs[host].begin_episode(seed)
        self.executor.begin_episode(self.runs[host])
        self.governors[host].load(NEWBORN)  # in place: a part of the population has the same one

    def final_scores(self) -> list[FinalScore]:
        """Harvest every host and read the test split: once, and then these episodes are over."""
        self._require_episode()
        self.told.is_over = True
        scores = []
        for run in self.runs:
            network = harvest(run.model).eval()
            accuracy, loss = self._score(
                network, run.splits.test.open_for_final_report(), run.device
            )
            validation, _ = self._score(network, run.splits.validation, run.device)
            scores.append(
                FinalScore(accuracy, loss, validation, count_parameters(network), network)
            )
        return scores

    @torch.no_grad()
    def _score(
        self, network: torch.nn.Module, split: Split, device: torch.device
    ) -> tuple[float, float]:
        scored = []
        for rows in torch.arange(len(split), device=device).split(1024):
            inputs, targets = split.gather(rows)
            scored.append(self.task.score(network(inputs).float(), targets))
        loss, accuracy = (float(torch.cat(parts).mean()) for parts in zip(*scored, strict=True))
        return accuracy, loss

    def _require_episode(self) -> None:
        if self.told.is_over:
            raise DataError(
                "the test split has been read, so these episodes are over; build a new population."
            )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns an allocation that failed into an error that names the knob to lower."""
    try:
        yield
    except RuntimeError as problem:
        is_gpu = isinstance(problem, torch.OutOfMemoryError)
        if not is_gpu and "can't allocate memory" not in str(
            problem
        ):  # as torch says it of the CPU's
            raise
        way_out = (
            "use fewer hosts (seeds), a lower batch, a narrower policy "
            "(ppo.hidden_dim) or more GPUs"
        )
        raise DeviceError(
            f"out of {'GPU ' * is_gpu}memory: {way_out}. ({str(problem).splitlines()[0]})"
        ) from problem


def _clock() -> float:
    """Seconds, without those in which blocks were compiled."""
    return time.perf_counter() - compiled_so_far()[1]


def _read(values: Sequence[torch.Tensor]) -> list[list[float]]:
    """One transfer per device for rows of equal length; the only place where the host waits for the
    device.
    """
    groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for value in values:
        groups.setdefault((value.device, len(value)), []).append(value)
    rows = {key: iter(torch.stack(members).tolist()) for key, members in groups.items()}
    return [next(rows[value.device, len(value)]) for value in values]
