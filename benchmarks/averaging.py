"""Hosts whose weights are averaged while they train; contributions at the weights of the moment or their average."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.kasmina.slot import SeedSlot
from esper.runtime.counterfactuals import bypassed
from esper.runtime.host import HostRun
from esper.runtime.population import Population
from esper.runtime.splits import Split

WINDOWS = (0.5, 2.0)
"""Epochs over which weights are averaged: the time constants of exponential averages."""
_CHUNK = {"cpu": 256, "cuda": 2048}


@dataclass
class Average:
    """The averages of one module's parameters and floating-point buffers, batch-norm statistics among them."""

    live: list[Tensor]
    kept: list[list[Tensor]]
    """one list per window"""
    steps: Tensor
    """steps that went into them: a plain mean until a window is full, so that a newborn seed's start is forgotten"""

    @classmethod
    def of(cls, module: nn.Module) -> "Average":
        live = [
            value.detach()
            for value in (*module.parameters(), *module.buffers())
            if value.is_floating_point()
        ]
        kept = [[value.clone() for value in live] for _ in WINDOWS]
        return cls(live, kept, torch.zeros((), device=live[0].device if live else None))

    def update(self, per_epoch: int) -> None:
        """Take in the weights of this step; nothing is read back, so that a graph can capture it."""
        self.steps += 1
        for window, kept in zip(WINDOWS, self.kept, strict=True):
            weight = torch.clamp(1 / self.steps, min=1 / (1 + window * per_epoch))
            change = torch._foreach_sub(self.live, kept)
            torch._foreach_mul_(change, weight)
            torch._foreach_add_(kept, change)

    def tensors(self) -> list[Tensor]:
        return [self.steps, *(value for kept in self.kept for value in kept)]


class AveragedRun(HostRun):
    """A host that trains to the bit as `HostRun` does and keeps the averages of its weights along."""

    _averages: WeakKeyDictionary[nn.Module, Average]

    @classmethod
    def adopt(cls, population: Population) -> None:
        """Let all hosts of a population that has not trained yet keep averages."""
        for run, governor in zip(population.runs, population.governors, strict=True):
            run.__class__ = cls
            run._averages = WeakKeyDictionary()  # type: ignore[attr-defined]
            governor.load(governor.state())

    def _owners(self) -> Iterator[tuple[str, nn.Module]]:
        yield "host", self.model.host
        for slot in self.slots:
            yield from (
                (f"{slot.slot_id}.{number}", fossil) for number, fossil in enumerate(slot.fossils)
            )
            if slot.seed is not None:
                yield f"{slot.slot_id}.seed", slot.seed

    def averages(self) -> dict[str, Average]:
        """By owner; a module that is new starts as it is."""
        found = {}
        for name, module in self._owners():
            if module not in self._averages:
                self._averages[module] = Average.of(module)
            found[name] = self._averages[module]
        return found

    def begin_epoch(self, *, clears: bool = True) -> None:
        super().begin_epoch(clears=clears)
        self.averages()  # made here, since a captured step must find them

    def learn(self, inputs: Tensor, targets: Tensor) -> None:
        super().learn(inputs, targets)
        with torch.no_grad():
            for average in self.averages().values():
                if average.live:
                    average.update(self.plan.steps)

    def tensors(self) -> dict[str, Tensor]:
        """With the averages, so that whoever puts a host back puts them back too."""
        named = super().tensors()
        for owner, average in self.averages().items():
            named |= {
                f"average|{owner}|{number}": value for number, value in enumerate(average.tensors())
            }
        return named

    @contextmanager
    def averaged(self, window: int) -> Iterator[None]:
        """The network at its averaged weights, by the number of the window; as before afterwards."""
        pairs = [
            pair
            for a in self.averages().values()
            for pair in zip(a.live, a.kept[window], strict=True)
        ]
        before = [live.clone() for live, _ in pairs]
        with torch.no_grad():
            for live, kept in pairs:
                live.copy_(kept)
        try:
            yield
        finally:
            with torch.no_grad():
                for (live, _), value in zip(pairs, before, strict=True):
                    live.copy_(value)


@contextmanager
def without(slot: SeedSlot, module: nn.Module) -> Iterator[None]:
    """The network as if this live seed or fossil were not there."""
    if module is slot.seed:
        with bypassed(slot):
            yield
        return
    fossils = slot.fossils
    slot.fossils = nn.ModuleList(fossil for fossil in fossils if fossil is not module)
    try:
        yield
    finally:
        slot.fossils = fossils


@torch.no_grad()
def losses_of(run: HostRun, network: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
    """Loss and correctness of each example, in evaluation mode."""
    was_training = network.training
    network.eval()
    scored = []
    for rows in torch.arange(len(split), device=run.device).split(_CHUNK[run.device.type]):
        inputs, targets = split.gather(rows)
        scored.append(run.task.score(network(inputs).float(), targets))
    network.train(was_training)
    losses, correct = (torch.cat(parts).double() for parts in zip(*scored, strict=True))
    return losses, correct


@contextmanager
def fresh_statistics(run: HostRun, count: int = 1024) -> Iterator[None]:
    """Batch-norm statistics of the network as it is inside, from training examples; as before afterwards."""
    norms = [
        module
        for module in run.model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    before = [(value, value.clone()) for norm in norms for value in norm.buffers()]
    momenta = [norm.momentum for norm in norms]
    was_training = run.model.training
    run.model.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    try:
        with torch.no_grad():
            for drawn in run.plan.placed[:, :count].split(256, 1):
                run.model(run.splits.train.gather(drawn[0], drawn[1:])[0])
        run.model.train(was_training)
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for value, kept in before:
            value.copy_(kept)


def gains_of(run: HostRun, slot: SeedSlot, module: nn.Module, split: Split) -> Tensor:
    """Loss without the module minus loss with it, example by example."""
    whole, _ = losses_of(run, run.model, split)
    with without(slot, module):
        ablated, _ = losses_of(run, run.model, split)
    return ablated - whole


def gradients_of(run: HostRun, module: nn.Module, count: int = 512) -> tuple[float, float]:
    """Gradient norm of a module over training examples that the host has just seen, and its ratio to the host's."""
    was_training = run.model.training
    run.model.eval()
    drawn = run.plan.placed[:, :count]
    inputs, targets = run.splits.train.gather(drawn[0], drawn[1:])
    own, host = list(module.parameters()), list(run.model.host.parameters())
    with torch.enable_grad():
        loss = run.task.score(run.model(inputs).float(), targets)[0].mean()
        found = torch.autograd.grad(loss, [*own, *host], allow_unused=True)
    run.model.train(was_training)
    norms = []
    for part, values in ((own, found[: len(own)]), (host, found[len(own) :])):
        size = sum(parameter.numel() for parameter in part)
        total = sum(float(value.double().square().sum()) for value in values if value is not None)
        norms.append((total**0.5, (total / size) ** 0.5 if size else 0.0))
    return norms[0][0], norms[0][1] / norms[1][1] if norms[1][1] > 0 else 0.0
