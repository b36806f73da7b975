"""N growing hosts that train side by side and know nothing of each other.

The caller decides about the order of calls.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from esper.kasmina.harvesting import harvest
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
from esper.runtime.closing import Remains, leaves_more_than_the_host, measure_remains
from esper.runtime.counterfactuals import incubated_slots, measured_slots, score_examples
from esper.runtime.devices import map_hosts, parse_devices
from esper.runtime.executors.choosing import choose_executor
from esper.runtime.executors.compiling import CompiledSoFar, compiled_so_far
from esper.runtime.governor import NEWBORN, Expectations, Governor, keep_together
from esper.runtime.host import EpochReading, HostRun, HostSnapshot
from esper.runtime.ledger import Charge, Phase
from esper.runtime.nursery import Nursery, WayToRun
from esper.runtime.splits import Split, Splits
from esper.runtime.tasks.task import Task


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


@dataclass(frozen=True)
class GovernedSnapshot:
    """Everything that decides how a host continues, and what its governor expects of it."""

    host: HostSnapshot
    expected: Expectations


@dataclass
class Shared:
    """What all parts of a population know together."""

    compiled: CompiledSoFar  # what has been reported of it
    charged_until: float = 0.0  # the time up to which some ledger has every second
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
        """Build one newborn host for every seed.

        Args:
            task: what hosts are trained on, and for how long.
            seeds: the random seed of every host.
            devices: where hosts train, in equal contiguous shares.
            executor: how steps are run: auto, eager or graphed.
            amp: precision of forward passes: off, bf16 or fp16.
            compile: whether blocks are compiled: auto, on or off.
            graph_memory: GiB of graphs per GPU; None is half of what is free.
            data_root: folder that holds the data sets.
            splits: examples to use instead of those that the task loads.
        """
        parsed = parse_devices(devices)
        self.placed = map_hosts(len(seeds), parsed)
        self.task = task
        self.amp = amp
        self.executor = choose_executor(executor, amp, parsed, task, graph_memory)
        splits = splits or task.load(data_root)
        self.corpus = splits.corpus
        with memory_errors():
            self.nursery = Nursery(task, splits, WayToRun(parsed, amp, compile))
            self.runs = [
                self.nursery.build(seed, device)
                for seed, device in zip(seeds, self.placed, strict=True)
            ]
            self.governors = [Governor(run) for run in self.runs]
            self.space = self.nursery.widest_space(self.runs[0].model.space)
        self.shared = Shared(compiled=compiled_so_far())
        self._scores: list[torch.Tensor] = []  # of the epoch that was started

    def expect_undecided(self, hosts: Sequence[int]) -> None:
        """Know that seeds of these hosts may stay on probation, as no rule keeps them.

        A budget of compute that cannot pay for measuring them is refused.
        """
        for host in hosts:
            run = self.runs[host]
            run.leaves_undecided = True
            if run.clock is not None:
                run.clock.plan(run)

    def measure_left(self) -> None:
        """Know that episodes end with a measurement without undecided seeds."""
        self.nursery.measure_left(self.runs)

    def describe(self, report: Callable[[str], None]) -> None:
        """Report what an episode may cost and what it rests on, where settings do not say so."""
        if self.task.varies is not None:
            report(f"{self.task.name}: {self.task.varies}")
            if any(device.type == "cuda" for device in self.placed):
                report("hosts of a family differ, so they run eagerly")
        for line in dict.fromkeys(str(run.clock) for run in self.runs if run.clock is not None):
            report(line)
        if self.corpus:
            report(f"corpus: {self.corpus}")

    def part(self, hosts: range) -> "Population":
        """Return some of the hosts, with everything else in common.

        Parts train at the same time, each with its own calls.
        """
        chosen = slice(hosts.start, hosts.stop)
        part = copy.copy(self)
        part.placed = self.placed[chosen]
        part.runs = self.runs[chosen]
        part.governors = self.governors[chosen]
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
        for run in self.runs:
            if run.clock is not None:
                run.clock.plan(run)
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
        for run, row, slot_scores in zip(self.runs, sums, scores, strict=True):
            run.end_epoch(row)
            if run.plan.steps:  # without a step none were drawn, and the last score still holds
                for slot, greedy_score in zip(run.slots, slot_scores, strict=True):
                    slot.set_plain(greedy_score=greedy_score)
            training = training_charges(run, run.flops, run.plan.examples)
            run.ledger.settle(training + score_charges(run, run.flops), seconds)
            run.ledger.peak_params = max(run.ledger.peak_params, run.model.total_params)
        return [reading for reading in self.readings() if reading is not None]

    def mark_charged(self) -> None:
        """Note that some ledger has every second until now, so that no other part is charged."""
        self.shared.charged_until = _clock()

    def _take_seconds(self, started: float) -> float:
        """Each host's part of the time since then that no part of the population was charged."""
        now = _clock()
        seconds = now - max(started, self.shared.charged_until)
        self.shared.charged_until = now
        return seconds / len(self.runs)

    def evaluate(self) -> list[Rollback]:
        """Measure held-out loss, accuracy and what seeds on probation contribute.

        Hosts that broke are rolled back.
        """
        self._require_episode()
        started = _clock()
        splits = [run.splits.validation for run in self.runs]
        with memory_errors():
            results = _read(self.executor.measure(self.runs, splits))
        seconds = self._take_seconds(started)
        rollbacks = []
        healthy = []
        for host, run in enumerate(self.runs):
            governor = self.governors[host]
            row = results[host]
            run.ledger.settle(evaluation_charges(run, run.flops), seconds)
            if run.reading is None:
                raise SettingError("evaluate() needs an epoch to judge; call train_epoch() first.")
            run.reading = replace(run.reading, held_out_loss=row[0], held_out_accuracy=row[1])
            problem = governor.judge(run.reading)
            if problem is not None:
                changes = tuple(governor.roll_back())
                rollbacks.append(Rollback(host=host, reason=problem, changes=changes))
            else:
                self._take_evidence(run, row[2:])
                healthy.append(governor)
        keep_together(healthy)
        return rollbacks

    def _take_evidence(self, run: HostRun, row: list[float]) -> None:
        """Give slots their gain and its error: `row` has the two of every slot, or is empty."""
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
        is_due = run.model.settings.prunes and not run.is_pruned and run.task.is_rate_low(run.epoch)
        # a host under suspicion is judged when it has recovered
        if not is_due or governor.bad_checks:
            return []
        run.is_pruned = True
        if not find_judged(run.model):
            return []
        started = time.perf_counter()
        charges: list[Charge] = []
        measure = self._scorer(run, "counterfactual", charges)
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

    def _scorer(
        self, run: HostRun, phase: Phase, charges: list[Charge]
    ) -> Callable[[], torch.Tensor]:
        """A function that scores held-out examples with the network as it then is.

        It adds the charge of every call to `charges`.
        """
        split = run.splits.validation

        def score() -> torch.Tensor:
            charges.append(Charge(phase, len(split), network_flops(run.model, run.flops)))
            return score_examples(run, split)

        return score

    def measure_remains(self, host: int) -> Remains | None:
        """Measure what the end of an episode leaves of a host; its reading is of that from now on.

        None where there is nothing but the bare host, which has been measured.
        """
        run = self.runs[host]
        if run.reading is None or not leaves_more_than_the_host(run.model):
            return None
        started = time.perf_counter()
        charges: list[Charge] = []
        with memory_errors():
            remains = measure_remains(run.model, self._scorer(run, "closing", charges))
        run.ledger.settle(charges, time.perf_counter() - started)
        self.mark_charged()
        run.reading = replace(
            run.reading, held_out_loss=remains.loss, held_out_accuracy=remains.accuracy
        )
        return remains

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

    def take_compiled(self) -> CompiledSoFar:
        """Return how many shapes of blocks were compiled since the last call, and how long."""
        before = self.shared.compiled
        now = compiled_so_far()
        self.shared.compiled = now
        return CompiledSoFar(
            shapes=now.shapes - before.shapes, seconds=now.seconds - before.seconds
        )

    def readings(self) -> list[EpochReading | None]:
        """Return the last epoch's reading of every host."""
        return [run.reading for run in self.runs]

    def reports(self) -> list[dict[str, SeedStateReport]]:
        """Return the reports of every host's slots, by slot id."""
        return [run.model.get_slot_reports() for run in self.runs]

    def views(self) -> list[GrowthView]:
        """Return what legality and masks are judged by, of every host."""
        return [run.model.view() for run in self.runs]

    def snapshot(self) -> list[GovernedSnapshot]:
        """Return everything that decides how each host continues."""
        snapshots = []
        for governor in self.governors:
            host = governor.run.snapshot()
            snapshots.append(GovernedSnapshot(host=host, expected=governor.state()))
        return snapshots

    def restore(self, snapshots: Sequence[GovernedSnapshot]) -> None:
        """Put every host back to its snapshot, in place."""
        self.executor.settle(self.runs)
        for governor, snapshot in zip(self.governors, snapshots, strict=True):
            governor.run.restore(snapshot.host)
            governor.load(snapshot.expected)

    def reset(self, host: int, seed: int) -> None:
        """Begin a new episode with the host of another seed; all other hosts are untouched."""
        self.executor.settle([self.runs[host]])
        self.nursery.begin_episode(self.runs[host], seed)
        self.executor.begin_episode(self.runs[host])
        self.governors[host].load(NEWBORN)  # in place: a part of the population has the same one

    def final_scores(self) -> list[FinalScore]:
        """Harvest every host and read the test split: once, and then these episodes are over."""
        self._require_episode()
        self.shared.is_over = True
        scores = []
        for run in self.runs:
            network = harvest(run.model).eval()
            test = _score(run, network, run.splits.test.open_for_final_report())
            validation = _score(run, network, run.splits.validation)
            score = FinalScore(
                accuracy=test.accuracy,
                loss=test.loss,
                validation_accuracy=validation.accuracy,
                params=count_parameters(network),
                network=network,
            )
            scores.append(score)
        return scores

    def _require_episode(self) -> None:
        if self.shared.is_over:
            raise DataError(
                "the test split has been read, so these episodes are over; build a new population."
            )


@dataclass(frozen=True)
class _SplitScore:
    """Mean loss and accuracy of a network on a split."""

    loss: float
    accuracy: float


@torch.no_grad()
def _score(run: HostRun, network: torch.nn.Module, split: Split) -> _SplitScore:
    """Score what a host has become on a split."""
    losses = []
    correct = []
    for rows in torch.arange(len(split), device=run.device).split(1024):
        inputs, targets = split.gather(rows)
        batch_losses, batch_correct = run.task.score(network(inputs).float(), targets)
        losses.append(batch_losses)
        correct.append(batch_correct)
    loss = float(torch.cat(losses).mean())
    accuracy = float(torch.cat(correct).mean())
    return _SplitScore(loss=loss, accuracy=accuracy)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn an allocation that failed into an error that names the knobs to lower."""
    try:
        yield
    except RuntimeError as problem:
        is_gpu = isinstance(problem, torch.OutOfMemoryError)
        is_cpu = "can't allocate memory" in str(problem)  # as torch says it of the CPU's
        if not is_gpu and not is_cpu:
            raise
        kind = "GPU memory" if is_gpu else "memory"
        raise DeviceError(
            f"out of {kind}: use fewer hosts (seeds), a lower batch, a narrower policy "
            f"(ppo.hidden_dim) or more GPUs. ({str(problem).splitlines()[0]})"
        ) from problem


def _clock() -> float:
    """Seconds, without those in which blocks were compiled."""
    return time.perf_counter() - compiled_so_far()[1]


def _read(values: Sequence[torch.Tensor]) -> list[list[float]]:
    """Read rows with one transfer per device and length.

    Only here does Python wait for the devices.
    """
    groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for value in values:
        groups.setdefault((value.device, len(value)), []).append(value)
    rows = {key: iter(torch.stack(members).tolist()) for key, members in groups.items()}
    return [next(rows[value.device, len(value)]) for value in values]
