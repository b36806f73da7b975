"""One host's episode: network, optimiser, examples, readings, all on its device.

Which hosts train when, and who decides about growth, is not known here.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pricing import HostFlops
from esper.kasmina.randomness import mix_seed, own_randomness
from esper.kasmina.readings import record_gradients
from esper.kasmina.slot import SlotContents
from esper.leyline.stages import SeedStage
from esper.runtime.batches import EpochPlan, ExampleStream, whole_steps
from esper.runtime.building import build_network, draws_random_numbers
from esper.runtime.clipping import clip_groups, gradient_groups
from esper.runtime.executors import compiling
from esper.runtime.ledger import Ledger
from esper.runtime.optimizers import build_optimizer, build_state
from esper.runtime.splits import Splits
from esper.runtime.tasks.families import Variation
from esper.runtime.tasks.task import Task
from esper.runtime.tensor_pairs import Pairs, copy_pairs, pair_tensors

if TYPE_CHECKING:
    from esper.runtime.clock import ComputeClock

AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EpochReading:
    """What one host's last epoch looked like; None is not measured."""

    epoch: int
    train_loss: float
    train_accuracy: float
    host_gradient_norm: float
    lr: float
    held_out_loss: float | None = None
    held_out_accuracy: float | None = None


@dataclass(frozen=True)
class PlainState:
    """The part of a host's snapshot that is not tensors."""

    slots: list[SlotContents]
    epoch: int
    births: int
    shadow_passes: int
    reading: EpochReading | None
    is_pruned: bool
    scaler: dict[str, Any]


@dataclass(frozen=True)
class HostSnapshot:
    """Everything that decides how a host continues; modules are kept by reference."""

    tensors: dict[str, Tensor]  # copies of parameters, buffers and optimiser state
    plain: PlainState
    stream: dict[str, Any]
    ledger: Ledger


@dataclass(frozen=True)
class Home:
    """What a host is trained on, and what that costs."""

    task: Task
    splits: Splits  # on the host's device
    flops: HostFlops
    clock: "ComputeClock | None"  # None where episodes are counted in epochs
    is_compiled: bool
    variation: Variation | None = None  # what the host has drawn, in a family


class HostRun:
    """Everything that belongs to one host.

    No two hosts share a generator, an optimiser or a scaler.
    """

    def __init__(self, home: Home, seed: int, device: torch.device, amp: str):
        self.device = device
        self.amp = AMP_TYPES[amp]
        # with clock compute, a host that no policy decides about pays for its last measurement only
        self.is_static = False
        # whether seeds may stay on probation, because no rule's standing order keeps them
        self.leaves_undecided = False
        self.move_in(home, seed)

    def move_in(self, home: Home, seed: int) -> None:
        """Be the newborn host of this seed, trained on what this home has; every tensor is new."""
        self.home = home
        self.task = home.task
        self.splits = home.splits
        self.seed = seed
        self.take_network(build_network(home.task, seed, home.splits.train.example(), self.device))
        # how many times each module's parameters got optimiser state: graphs know one of them
        self.primings: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.prime()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp is torch.float16)
        self._plan_steps(None if home.clock is None else home.clock.most_steps)
        self.pays_for_measuring = True
        self.has_segments = self._find_segments()
        self._place_readings()
        self.is_random = draws_random_numbers(self.model.host)
        self.epoch = 0
        self.step = 0
        self.is_pruned = False  # whether this episode's fossils have been judged
        self.ledger = Ledger(peak_params=self.model.total_params)
        self.reading: EpochReading | None = None
        self._birth = self.snapshot()

    @property
    def flops(self) -> HostFlops:
        """What the bare host costs."""
        return self.home.flops

    @property
    def clock(self) -> "ComputeClock | None":
        """The budget of the episode, where that is counted in compute."""
        return self.home.clock

    @property
    def variation(self) -> Variation | None:
        """What the host has drawn, in a family."""
        return self.home.variation

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.home.is_compiled

    @property
    def progress(self) -> float:
        """The share of the episode that is over: of its epochs, or of its compute."""
        if self.clock is None:
            return self.epoch / self.task.epochs
        return self.ledger.flops / self.clock.budget

    def _plan_steps(self, most: int | None) -> None:
        """Place what decides about the steps of an epoch: examples, rates, a counter."""
        count = len(self.splits.train)
        steps = whole_steps(self.task.epoch_examples or count, self.task.batch)
        if most:
            steps = steps._replace(number=most)
        stream = ExampleStream(count, mix_seed(self.seed, 2))
        self.plan = EpochPlan(self.splits.train, stream, steps, self.task.augment, self.device)
        # of each of the next epoch's steps, where a clock plans them; else the epoch's
        self.rates: list[float] = []
        self._listed_rates = torch.zeros(most or 1, pin_memory=self.device.type == "cuda")
        self._placed_rates = self._listed_rates.to(self.device, copy=True)
        # steps of this epoch so far
        self.taken = torch.zeros(1, dtype=torch.long, device=self.device)

    def _find_segments(self) -> bool:
        """Whether the host runs in segments that begin and end at its very slots.

        Prefixes can then be shared.
        """
        host = self.model.host
        if not isinstance(host, SegmentedHost):
            return False
        return self.model.slot_config.modules.items() <= host.slot_config().modules.items()

    def _place_readings(self) -> None:
        """Place an epoch's sums, and which slots have a seed, on the device."""
        count = len(self.slots)
        self.sums = torch.zeros(3 + count, device=self.device)
        self._zero = torch.zeros((), device=self.device)
        self._live = [False] * count  # whether a slot's newest module is a live seed
        is_cuda = self.device.type == "cuda"
        self._listed_live = torch.zeros(count, dtype=torch.bool, pin_memory=is_cuda)
        # the same where a captured step looks it up
        self.live = self._listed_live.to(self.device, copy=True)

    def take_network(self, model: MorphogeneticModel) -> None:
        """Train this network from now on, with an optimiser of its own."""
        self.model = model
        self.optimizer = build_optimizer(self.task, model, self.device)
        model.train()  # whatever mode its host was built in
        self.link = model.attach(self.optimizer, follows_rates=False)
        # on a GPU it is one tensor for all groups, written once
        rate = self.optimizer.param_groups[0]["lr"]
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        self.slots = model.ordered_slots

    def begin_episode(self, seed: int) -> None:
        """Be the newborn host of another seed, in the same tensors: captured graphs stay right."""
        self.restore(self._birth)
        self.primings.clear()
        with own_randomness(seed):
            newborn = self.task.build_host()
        with torch.no_grad():
            for tensors in (nn.Module.parameters, nn.Module.buffers):
                for old, new in zip(tensors(self.model.host), tensors(newborn), strict=True):
                    old.copy_(new)
        self.seed = seed
        self.model.settings = replace(self.model.settings, seed=mix_seed(seed, 1))
        self.plan.stream = ExampleStream(len(self.splits.train), mix_seed(seed, 2))
        self.ledger = Ledger(peak_params=self.model.total_params)

    def begin_epoch(self, *, clears: bool = True) -> None:
        """Place learning rates and examples of the next epoch on the device.

        `clears` says that counters are cleared here, not by a graph.
        """
        self._set_rate(self.rates[0] if self.rates else self.task.rate(self.epoch))
        if self.rates:
            self._listed_rates[: len(self.rates)] = torch.tensor(self.rates)
            self._placed_rates.copy_(self._listed_rates, non_blocking=True)
        live = [slot.seed is not None for slot in self.slots]
        if live != self._live:
            self._live = live
            self._listed_live[:] = torch.tensor(live)
            self.live.copy_(self._listed_live, non_blocking=True)
        if clears:
            self.clear()
        self.step = 0
        self.plan.draw()
        if not self.model.training:
            self.model.train()

    def clear(self) -> Self:
        """Set the device's counters and sums of an epoch to 0."""
        for counter in (self.taken, self.sums, self.plan.cursor):
            counter.zero_()
        return self

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step; the same call is run eagerly and captured into a graph.

        Nothing is read back.
        """
        self.step += 1
        is_cuda = self.device.type == "cuda"
        if self.task.clock == "compute":
            if is_cuda:  # the rate is looked up there, so that a captured step finds it
                self._set_rate(self._placed_rates.index_select(0, self.taken)[0])
            else:
                self._set_rate(self.rates[self.step - 1])
            self.taken += 1
        # a host that draws does so from its own numbers, whichever hosts train beside it
        devices = [self.device.index or 0] if is_cuda else []
        randomness = own_randomness(self.seed, 3, self.epoch, self.step, devices=devices)
        with randomness if self.is_random or not is_cuda else nullcontext():
            self._learn(inputs, targets)

    def _set_rate(self, rate: float | Tensor) -> None:
        placed_rate = self.optimizer.param_groups[0]["lr"]
        if isinstance(placed_rate, Tensor):
            placed_rate.fill_(rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _learn(self, inputs: Tensor, targets: Tensor) -> None:
        losses, correct = self._forward(inputs, targets)
        self.scaler.scale(losses.mean()).backward()
        if any(slot.state.stage is SeedStage.TRAINING for slot in self.slots):
            with self.model.shadow():
                self.scaler.scale(self._forward(inputs, targets)[0].mean()).backward()
        self.scaler.unscale_(self.optimizer)
        norms = self.clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.sums += torch.stack([losses.detach().sum(), correct.sum(), *norms])

    def _forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.autocast():
            outputs = self.model(inputs)
        if self.is_compiled:
            return compiling.score(self.task.score, outputs, targets)
        return self.task.score(outputs.float(), targets)

    def autocast(self) -> torch.autocast:
        """Return the context in which the network runs in this host's precision."""
        return torch.autocast(
            self.device.type, self.amp or torch.bfloat16, enabled=self.amp is not None
        )

    def clip_gradients(self) -> list[Tensor]:
        """Clip host and seeds apart; returns their norms of before, which are readings."""
        groups = gradient_groups(self.model, self.slots)
        norms = clip_groups(groups, self.live, self._zero, self.task.clip_norm)
        if self.scaler.is_enabled():  # an overflow skips its step, so it is no reading of the host
            norms = [torch.nan_to_num(norm, nan=0.0, posinf=0.0) for norm in norms]
        return norms

    def end_epoch(self, sums: list[float]) -> None:
        """Turn the device's sums into this epoch's reading; called after the one read per epoch."""
        loss, correct, *norms = sums
        steps = self.plan.steps
        examples = self.plan.examples
        if steps:
            self.reading = EpochReading(
                epoch=self.epoch,
                train_loss=loss / examples,
                train_accuracy=correct / examples,
                host_gradient_norm=norms[0] / steps,
                lr=self.rates[-1] if self.rates else self.task.rate(self.epoch),
            )
            record_gradients(self.slots, norms, self._groups(), steps)
        else:  # a share of compute that was too small for a step: what was read before still holds
            assert self.reading is not None
            self.reading = replace(self.reading, epoch=self.epoch)
        self.epoch += 1

    def snapshot(self) -> HostSnapshot:
        """Return everything that decides how this host continues.

        Tensors are copied, modules are kept by reference.
        """
        snapshot, _ = self.paired_snapshot()
        return snapshot

    def paired_snapshot(
        self, known: Mapping[int, Tensor] | None = None
    ) -> tuple[HostSnapshot, Pairs]:
        """Return a snapshot, and its tensors beside those that they were copied from.

        `known` are tensors to copy into, by the id of the tensor that is copied.
        """
        known = known or {}
        live = self.tensors()
        kept: dict[str, Tensor] = {}
        for name, tensor in live.items():
            kept[name] = known[id(tensor)] if id(tensor) in known else torch.empty_like(tensor)
        pairs = pair_tensors(kept.values(), live.values())
        copy_pairs(pairs)
        snapshot = HostSnapshot(
            tensors=kept,
            plain=self.plain_state(),
            stream=self.plan.stream.state(),
            ledger=self.ledger.copy(),
        )
        return snapshot, pairs

    def plain_state(self) -> PlainState:
        """Return the part of a snapshot that is not tensors."""
        return PlainState(
            slots=[slot.contents() for slot in self.slots],
            epoch=self.epoch,
            births=self.model.births,
            shadow_passes=self.model.shadow_passes,
            reading=self.reading,
            is_pruned=self.is_pruned,
            scaler=self.scaler.state_dict(),
        )

    def restore(self, snapshot: HostSnapshot, *, with_stream: bool = True) -> None:
        """Go back, in place: values are copied into the tensors that captured graphs read.

        Without `with_stream` only what was learnt goes back; examples, counters and costs continue.
        """
        self._restore_slots(snapshot.plain.slots)
        for group, parameters in zip(self._groups(), self.model.owners(), strict=True):
            group[:] = parameters  # in the order that they have in the network
        self._forget_removed()
        self.prime()
        live = self.tensors()
        copy_pairs(pair_tensors(live.values(), [snapshot.tensors[name] for name in live]))
        self.scaler.load_state_dict(snapshot.plain.scaler)
        if with_stream:
            self.plan.stream.load(snapshot.stream)
            self.ledger = snapshot.ledger.copy()
            self.epoch = snapshot.plain.epoch
            self.model.births = snapshot.plain.births
            self.model.shadow_passes = snapshot.plain.shadow_passes
            self.reading = snapshot.plain.reading
            self.is_pruned = snapshot.plain.is_pruned

    def _restore_slots(self, slots: Sequence[SlotContents]) -> None:
        fossils: set[int] = set()
        for slot in self.slots:
            fossils.update(id(fossil) for fossil in slot.fossils)
        for slot, contents in zip(self.slots, slots, strict=True):
            seed = contents.seed
            if seed is not None and id(seed) in fossils:
                # a graph of the fossil does not read the seed's alpha
                self.primings[seed] = self.primings.get(seed, 0) + 1
            slot.take(contents)

    def _forget_removed(self) -> None:
        """Drop the optimiser state of parameters that the network no longer has."""
        present = {id(parameter) for parameter in self.model.parameters()}
        for parameter in list(self.optimizer.state):
            if id(parameter) not in present:
                del self.optimizer.state[parameter]

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters, buffers and optimiser state by name."""
        named = dict(self.model.state_dict(keep_vars=True))
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    named[f"{name}|{key}"] = value
        return named

    def _groups(self) -> list[list[nn.Parameter]]:
        """The optimiser's parameters of each of the model's owners: the host, then every slot."""
        home = self.link.home  # the task's optimiser has one group, so slots have one like it
        numbers = [home, *(self.link.groups[slot.slot_id][home] for slot in self.slots)]
        return [self.optimizer.param_groups[number]["params"] for number in numbers]

    def prime(self) -> None:
        """Give new parameters their optimiser state.

        Graphs that know other state tensors are then out of date.
        """
        modules: list[nn.Module] = [self.model.host]
        for slot in self.slots:
            modules += slot.fossils
            if slot.seed is not None:
                modules.append(slot.seed)
        for module in modules:
            parameters = module.parameters()
            new = [parameter for parameter in parameters if not self.optimizer.state[parameter]]
            for parameter in new:
                self.optimizer.state[parameter] = build_state(self.optimizer, parameter)
            if new:
                self.primings[module] = self.primings.get(module, 0) + 1
        if self.is_compiled:
            compiling.compile_blocks(self.model)
        if self.is_compiled or (self.amp is torch.bfloat16 and self.device.type == "cuda"):
            compiling.lay_out(self.optimizer)
