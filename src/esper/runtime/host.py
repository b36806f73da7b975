"""One host's episode: network, optimiser, examples, readings, all on its device. Executors call `learn`."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import choose_places, find_names, find_places
from esper.kasmina.randomness import mix_seed, own_randomness
from esper.kasmina.settings import GrowthSettings
from esper.kasmina.slot import SeedSlot, count_parameters
from esper.leyline.errors import UnknownNameError
from esper.leyline.slots import SlotConfig, is_slot_id
from esper.leyline.stages import SeedStage
from esper.runtime import compiling
from esper.runtime.batches import EpochPlan, ExampleStream, whole_steps
from esper.runtime.ledger import Ledger
from esper.runtime.splits import Splits
from esper.runtime.tasks import Task

AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Pairs = dict[Any, tuple[list[Tensor], list[Tensor]]]  # By kind of tensor.
_MOMENTUM = 0.9


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


class HostRun:
    """Everything that belongs to one host. No two hosts share a generator, an optimiser or a scaler."""

    def __init__(
        self,
        task: Task,
        splits: Splits,
        seed: int,
        device: torch.device,
        amp: str,
        is_compiled: bool,
        most: int | None,
    ):
        self.task, self.splits, self.seed, self.device, self.is_compiled = (
            task,
            splits,
            seed,
            device,
            is_compiled,
        )
        self.amp = AMP_TYPES[amp]
        with own_randomness(seed):
            host = task.build_host().to(device)
        settings = GrowthSettings(
            task.lengths,
            task.scale_at_birth,
            task.blends,
            task.epochs,
            seed=mix_seed(seed, 1),
            prunes=task.prunes,
        )
        limits: dict[str, Any] = {
            "max_seeds": task.max_seeds,
            "budget": int(task.budget * count_parameters(host)),
        }
        limits |= {"blueprints": task.blueprints, "settings": settings}
        example = splits.train.example()
        self.take_network(
            MorphogeneticModel(
                host, name_slots(host, task.slots, example), example=example, **limits
            )
        )
        self._primed: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.prime()
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp is torch.float16)
        count = len(splits.train)
        steps, size = whole_steps(task.epoch_examples or count, task.batch)
        stream = ExampleStream(count, mix_seed(seed, 2))
        self.plan = EpochPlan(splits.train, stream, (most or steps, size), task.augment, device)
        self.rates: list[
            float
        ] = []  # of each of the next epoch's steps, where a clock plans them; else the epoch's
        self._listed_rates = torch.zeros(most or 1, pin_memory=device.type == "cuda")
        self._placed_rates = self._listed_rates.to(device, copy=True)
        self.taken = torch.zeros(1, dtype=torch.long, device=device)  # steps of this epoch so far
        self.is_static = False  # nobody decides about it: with clock compute it then pays for its last measurement only
        self.pays_for_measuring = True
        own = self.model.slot_config.modules.items()
        self.has_segments = (
            isinstance(host, SegmentedHost) and own <= host.slot_config().modules.items()
        )
        """whether the host runs in segments that begin and end at these very slots, so that prefixes can be shared"""
        self.sums = torch.zeros(3 + len(self.slots), device=device)
        self._nothing = torch.zeros((), device=device)
        self._live = [False] * len(self.slots)  # whether a slot's last module is a live seed
        self._listed_live = torch.zeros(
            len(self.slots), dtype=torch.bool, pin_memory=device.type == "cuda"
        )
        self.live = self._listed_live.to(
            device, copy=True
        )  # the same where a captured step looks it up
        self.is_random = draws_random_numbers(host)
        self.epoch = self.step = 0
        self.is_pruned = False  # whether this episode's fossils have been judged
        self.ledger = Ledger(peak_params=self.model.total_params)
        self.reading: EpochReading | None = None
        self._birth = self.snapshot()

    def take_network(self, model: MorphogeneticModel) -> None:
        """Train this network from now on, with an optimiser of its own."""
        self.model, self.optimizer = model, build_optimizer(self.task, model, self.device)
        model.train()  # whatever mode its host was built in
        self.link = model.attach(self.optimizer, follows_rates=False)
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.param_groups[0]["lr"]  # on a GPU one tensor, written once
        self.slots: list[SeedSlot] = [model.slot(slot_id) for slot_id in model.slot_config.slot_ids]

    def begin_episode(self, seed: int) -> None:
        """Be the newborn host of another seed, in the same tensors: captured graphs stay right."""
        self.restore(self._birth)
        self._primed.clear()
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

    def topology(self) -> tuple[Any, ...]:
        """The modules, each with the number of its optimiser state, and what they are: host, fossil or seed."""
        return self.wiring(), *(s.seed for s in self.slots)

    def wiring(self) -> tuple[Any, ...]:
        """Equal exactly where one captured graph is right, which is so before and after a seed is kept."""
        number = self._primed.get
        return self.model, *(
            (
                s.seed is None or s.is_in_output,
                *((m, number(m)) for m in (*s.fossils, s.seed) if m is not None),
            )
            for s in self.slots
        )

    def begin_epoch(self, *, clears: bool = True) -> None:
        """Learning rates and examples of the next epoch go to the device; counters are cleared, unless a graph does."""
        self._set_rate(self.rates[0] if self.rates else self.task.rate(self.epoch))
        if self.rates:
            self._listed_rates[: len(self.rates)] = torch.tensor(self.rates)
            self._placed_rates.copy_(self._listed_rates, non_blocking=True)
        if self._live != (live := [slot.seed is not None for slot in self.slots]):
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
        """The device's counters and sums of an epoch begin at 0."""
        for counter in (self.taken, self.sums, self.plan.cursor):
            counter.zero_()
        return self

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step; the same call is run eagerly and captured into a graph. Nothing is read back."""
        self.step += 1
        is_cuda = self.device.type == "cuda"
        if (
            self.task.clock == "compute"
        ):  # on a GPU the rate is looked up there, so that a captured step finds it
            self._set_rate(
                self._placed_rates.index_select(0, self.taken)[0]
                if is_cuda
                else self.rates[self.step - 1]
            )
            self.taken += 1
        # a host that draws does so from numbers of its own, so that it does not matter who trains beside it
        own = own_randomness(
            self.seed, 3, self.epoch, self.step, devices=[self.device.index or 0] if is_cuda else []
        )
        with own if self.is_random or not is_cuda else nullcontext():
            self._learn(inputs, targets)

    def _set_rate(self, rate: float | Tensor) -> None:
        if isinstance(known := self.optimizer.param_groups[0]["lr"], Tensor):
            known.fill_(rate)
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
        norms = self._clip()
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
        return torch.autocast(
            self.device.type, self.amp or torch.bfloat16, enabled=self.amp is not None
        )

    def _clip(self) -> list[Tensor]:
        """Clip host and seeds apart; the norms before clipping are readings.

        As `MorphogeneticModel.clip_gradients`, but what is a seed is looked up on the device: a captured step stays
        right when a slot's last module, clipped by itself while it is a seed, becomes part of the host.
        """
        lasts = [[m for m in (*s.fossils, s.seed) if m is not None][-1:] for s in self.slots]
        own = [
            [p.grad for last in one for p in last.parameters() if p.grad is not None]
            for one in lasts
        ]
        theirs = {id(gradient) for part in own for gradient in part}
        parts = [
            [
                p.grad
                for p in self.model.parameters()
                if p.grad is not None and id(p.grad) not in theirs
            ],
            *own,
        ]
        each = iter(
            torch.stack(torch._foreach_norm([g for part in parts for g in part])).split(
                [*map(len, parts)]
            )
        )
        rest, lives = torch.stack([torch.linalg.vector_norm(norms) for norms in each]).tensor_split(
            [1]
        )
        # no plain 0.0: torch would copy it to the device, and a graph from where it then was
        host = torch.linalg.vector_norm(
            torch.cat([rest, torch.where(self.live, self._nothing, lives)])
        )
        norms = [host, *torch.where(self.live, lives, self._nothing)]
        factors = (self.task.clip_norm / (torch.stack(norms) + 1e-6)).clamp(
            max=1.0
        )  # as torch clips
        for part, factor in zip(
            parts, [factors[0], *torch.where(self.live, factors[1:], factors[0])], strict=True
        ):
            if part:
                torch._foreach_mul_(part, factor)
        if self.scaler.is_enabled():  # an overflow skips its step, so it is no reading of the host
            norms = [torch.nan_to_num(norm, nan=0.0, posinf=0.0) for norm in norms]
        return norms

    def end_epoch(self, sums: list[float]) -> None:
        """Turn the device's sums into this epoch's reading; called after the one read per epoch."""
        loss, correct, *norms = sums
        steps, examples = self.plan.steps, self.plan.examples
        if steps:
            rate = self.rates[-1] if self.rates else self.task.rate(self.epoch)
            self.reading = EpochReading(
                self.epoch, loss / examples, correct / examples, norms[0] / steps, rate
            )
            self.model.record_gradients(norms, steps, self._groups())
        else:  # a share of compute that was too small for a step: what was read before still holds
            assert self.reading is not None
            self.reading = replace(self.reading, epoch=self.epoch)
        self.epoch += 1

    def snapshot(self) -> dict[str, Any]:
        """Everything that decides how this host goes on; tensors are copied, modules are kept by reference."""
        return self.paired_snapshot()[0]

    def paired_snapshot(
        self, known: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[str, Any], Pairs]:
        """A snapshot, and its tensors beside those that they were copied from; `known` are some to copy into, by id."""
        live, known = self.tensors(), known or {}
        kept = {n: known[id(v)] if id(v) in known else torch.empty_like(v) for n, v in live.items()}
        copy_pairs(pairs := pair_tensors(kept.values(), live.values()))
        rest = {"stream": self.plan.stream.state(), "ledger": self.ledger.copy()}
        return {"tensors": kept, **self.plain_state(), **rest}, pairs

    def plain_state(self) -> dict[str, Any]:
        """The part of a snapshot that is not tensors."""
        slots = [
            ([*s.fossils], [*s.fossil_names], s.seed, s.state, s.built_in, *s.readings())
            for s in self.slots
        ]
        counters = (
            self.epoch,
            self.model.births,
            self.model.shadow_passes,
            self.reading,
            self.is_pruned,
        )
        return {"slots": slots, "counters": counters, "scaler": self.scaler.state_dict()}

    def restore(self, snapshot: dict[str, Any], *, with_stream: bool = True) -> None:
        """Go back, in place: values are copied into the tensors that captured graphs read."""
        kept = {id(fossil) for slot in self.slots for fossil in slot.fossils}
        for seed in [seed for _, _, seed, *_ in snapshot["slots"] if id(seed) in kept]:
            self._primed[seed] = (
                self._primed.get(seed, 0) + 1
            )  # a graph of the fossil does not read the seed's alpha
        for slot, (fossils, names, seed, state, built_in, *readings) in zip(
            self.slots, snapshot["slots"], strict=True
        ):
            slot.fossils, slot.fossil_names, slot.seed = nn.ModuleList(fossils), list(names), seed
            slot.assign(state)
            slot.built_in = built_in
            slot.gradient_ratio, slot.gradient_norm, slot.greedy_score = readings
        for group, own in zip(self._groups(), self.model.owners(), strict=True):
            group[:] = own  # as the places of parameters in the network say
        known = {id(p) for p in self.model.parameters()}
        for parameter in [p for p in self.optimizer.state if id(p) not in known]:
            del self.optimizer.state[parameter]
        self.prime()
        live = self.tensors()
        copy_pairs(pair_tensors(live.values(), [snapshot["tensors"][name] for name in live]))
        self.scaler.load_state_dict(snapshot["scaler"])
        if with_stream:
            self.plan.stream.load(snapshot["stream"])
            self.ledger = snapshot["ledger"].copy()
            (
                self.epoch,
                self.model.births,
                self.model.shadow_passes,
                self.reading,
                self.is_pruned,
            ) = snapshot["counters"]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and optimiser state by name."""
        named = dict(self.model.state_dict(keep_vars=True))
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter].items()
            named |= {f"{name}|{key}": value for key, value in state if isinstance(value, Tensor)}
        return named

    def _groups(self) -> list[list[nn.Parameter]]:
        """The parameters that the optimiser has of each of the model's owners, which are the same ones."""
        home, groups = (
            self.link.home,
            self.optimizer.param_groups,
        )  # the task's optimiser has one group of its own
        return [
            groups[place]["params"]
            for place in (home, *(self.link.groups[s.slot_id][home] for s in self.slots))
        ]

    def prime(self) -> None:
        """Give new parameters their optimiser state; graphs that know other state tensors are then out of date."""
        for module in (
            self.model.host,
            *(m for s in self.slots for m in (*s.fossils, s.seed) if m is not None),
        ):
            new = [
                parameter
                for parameter in module.parameters()
                if not self.optimizer.state[parameter]
            ]
            for parameter in new:
                self.optimizer.state[parameter] = build_state(self.optimizer, parameter)
            if new:
                self._primed[module] = self._primed.get(module, 0) + 1
        if self.is_compiled:
            compiling.compile_blocks(self.model)
        if self.is_compiled or (self.amp is torch.bfloat16 and self.device.type == "cuda"):
            compiling.lay_out(self.optimizer)


def pair_tensors(into: Iterable[Tensor], of: Iterable[Tensor]) -> Pairs:
    """Tensors to copy into and those to copy, by kind: mixed ones would be copied one by one."""
    pairs: Pairs = {}
    for kept, live in zip(into, of, strict=True):
        both = pairs.setdefault((kept.device, kept.dtype, live.device), ([], []))
        both[0].append(kept)
        both[1].append(live)
    return pairs


@torch.no_grad()
def copy_pairs(pairs: Pairs) -> None:
    for into, of in pairs.values():
        torch._foreach_copy_(into, of)


def draws_random_numbers(host: nn.Module) -> bool:
    shares = [
        getattr(m, "p" if isinstance(m, nn.modules.dropout._DropoutNd) else "dropout", 0)
        for m in host.modules()
    ]
    return any(isinstance(share, int | float) and share > 0 for share in shares)


def name_slots(
    host: nn.Module, patterns: tuple[str, ...] | None, example: Tensor
) -> SlotConfig | None:
    """Slots for the modules, or the host's own slots, that the patterns mean; None leaves it to the host."""
    if patterns is None:
        return None
    own = host.slot_config() if isinstance(host, SegmentedHost) else None
    if own is not None and any(is_slot_id(name) for name in patterns):
        return own.choose(patterns)
    places = find_places(host, example)
    for pattern in patterns:
        if not find_names(pattern, [name for name, _ in host.named_modules()]):
            fitting = [place.name for place in places if place.problem is None]
            raise UnknownNameError(
                "slot or module", pattern, [*fitting, *(own.slot_ids if own else ())]
            )
    return SlotConfig.for_modules(place.name for place in choose_places(host, places, patterns))


def build_optimizer(task: Task, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """The task's optimiser; on a GPU its rate is a tensor, so that a captured graph follows the plan."""
    is_cuda = device.type == "cuda"
    rate = torch.tensor(task.lr, device=device) if is_cuda else task.lr
    options: dict[str, Any] = {
        "lr": rate,
        "weight_decay": task.weight_decay,
        "fused": is_cuda or None,
    }
    if task.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(), betas=(0.9, task.beta2), capturable=is_cuda, **options
        )
    return torch.optim.SGD(model.parameters(), momentum=_MOMENTUM, nesterov=True, **options)


def build_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Zero state of a parameter that has none: its first step is then like every other."""
    zeros = torch.zeros_like(parameter)
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": zeros}
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": zeros,
        "exp_avg_sq": zeros.clone(),
    }
