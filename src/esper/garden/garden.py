"""Growing inside the user's own training loop:

wrap a model, step once per epoch, take a plain network home.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.episodes import (
    act,
    close_ledger,
    facts_of,
    name_modules,
    tell_changes,
    tell_fossils,
    tell_seeds,
)
from esper.garden import keeping, processes
from esper.garden import report as reporting
from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.evidence import as_losses, measure_pairs
from esper.kasmina.exporting import export_network
from esper.kasmina.fitting import refuse_wrapped, total_budget
from esper.kasmina.harvesting import harvest
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.optimizer_saving import OptimizerSnapshot
from esper.kasmina.pricing import HostFlops
from esper.kasmina.probing import Example, Place, choose_places, find_places, undisturbed
from esper.kasmina.pruning import prune
from esper.kasmina.saving import load_network, restore_network, save_network
from esper.kasmina.slot import remove_slots
from esper.leyline.errors import (
    HostError,
    MeasurementError,
    OptimizerError,
    SettingError,
    UnknownNameError,
)
from esper.leyline.factored_actions import OP_WAIT
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.runtime.executors.compiling import forget_compiled
from esper.runtime.executors.structure import compiled_key
from esper.runtime.ledger import Charge, Ledger
from esper.tamiyo.masks import compute_batch_masks
from esper.tamiyo.policies import Policy
from esper.tamiyo.policy_names import Rule, make_policy, parse
from esper.tamiyo.rules import RULES, HostFacts
from esper.telemetry.curve_export import TrackerName
from esper.telemetry.events import Event, GrowthReported, HostEpoch, LedgerClosed

Evaluate = Callable[
    [], Tensor
]  # Held-out values, one per example, of the model as it stands, in eval mode.


def inspect(model: nn.Module, example: Example) -> list[Place]:
    """Every place in a model where a slot would fit, in the order of execution, and why others do
    not.
    """
    return find_places(model, example)


def grow(
    model: nn.Module,
    *,
    slots: str | Sequence[str],
    example: Example,
    blueprints: Sequence[str] | None = None,
    budget: float | int | None = None,
    max_seeds: int | None = None,
    policy: str | Callable[[HostFacts], Policy] = "heuristic",
    higher_is_better: bool | None = None,
    settings: GrowthSettings | None = None,
) -> "Garden":
    """Wrap a model so that it can grow while you train it.

    Args: slots: names, shell patterns or regular expressions of sub-modules; a seed grows on each
        one's output. example: one batch, as the model takes it, to learn the shapes from. budget:
        most parameters in all; a float is a multiple of the model's own, an int a number.
        max_seeds: most seeds, live and kept; without it and without a budget, one per slot. policy:
        "never", "schedule", "random", "heuristic", "sham", or a function from `HostFacts` to a
        policy. higher_is_better: whether `evaluate` returns scores; by default bools are scores,
        numbers are losses.
    """
    settings = GrowthSettings() if settings is None else settings
    if not isinstance(settings, GrowthSettings):
        raise SettingError(
            f"settings is a {type(settings).__name__}; write "
            f"settings=esper.GrowthSettings(epochs=30)."
        )
    if isinstance(model, MorphogeneticModel):
        raise HostError("this model already grows; use its garden, or grow garden.harvest().")
    refuse_wrapped(model)
    processes.share([*model.parameters(), *model.buffers()])
    patterns = [slots] if isinstance(slots, str) else list(slots)
    chosen = (
        [blueprints]
        if isinstance(blueprints, str)
        else None
        if blueprints is None
        else list(blueprints)
    )
    if not patterns:
        raise SettingError(
            "slots is empty; name at least one module. esper.inspect(model, example) "
            "lists the places."
        )
    if chosen == []:
        raise SettingError(
            "blueprints is empty; name at least one, or leave it out for those that usually fit."
        )
    places = choose_places(model, find_places(model, example, settings.kinds), patterns)
    names = list(chosen or REGISTRY.defaults_for(str(place.kind) for place in places))
    needed = parse(policy).blueprints() if isinstance(policy, str) else ()
    names += [name for name in needed if name not in names]
    most = len(places) if max_seeds is None and budget is None else max_seeds
    limits = {"max_seeds": most, "budget": total_budget(budget, model)}
    config = SlotConfig.for_modules(place.name for place in places)
    grown = MorphogeneticModel(
        model, config, example=example, blueprints=names, settings=settings, **limits
    )
    sites = {slot_id: grown.site(slot_id) for slot_id in config.slot_ids}
    prices = HostFlops.of_model(model, example, sites)
    return _tend(grown, policy, higher_is_better, prices)


def _tend(model: MorphogeneticModel, *given: Any) -> "Garden":
    """A garden of this model; if that is refused, the host can be grown again."""
    try:
        return Garden(model, *given)
    except Exception:
        remove_slots(model.host)
        raise


class Garden:
    """A growing model and whoever decides about it.

    One `step` per epoch, between two epochs of training.
    """

    def __init__(
        self,
        model: MorphogeneticModel,
        policy: str | Callable[[HostFacts], Policy] = "heuristic",
        higher_is_better: bool | None = None,
        prices: HostFlops | None = None,
    ):
        """`prices` are of one example through the bare host; None where they cannot be counted."""
        self.model = model
        for slot_id in model.slot_config.slot_ids:
            model.slot(slot_id).is_noted = True
        facts = facts_of(model, model.settings.epochs)
        own = getattr(policy, "__name__", type(policy).__name__)
        if own == "<lambda>":  # two of them are not one policy
            own += f":{policy.__code__.co_firstlineno}"  # type: ignore[union-attr]
        self.policy_name = policy if isinstance(policy, str) else f"{own}()"  # no rule is called so
        if not isinstance(policy, str) and not callable(policy):
            raise SettingError(
                f"policy is {policy!r}; give one of {', '.join(RULES)} or a function of HostFacts."
            )
        self.policy: Policy = (
            make_policy(policy, facts) if isinstance(policy, str) else policy(facts)
        )
        if not hasattr(self.policy, "decide"):
            raise SettingError(
                f"policy built a {type(self.policy).__name__}, which has no method decide(...)."
            )
        if higher_is_better not in (None, True, False):
            raise SettingError(
                f"higher_is_better is {higher_is_better!r}; write True for scores, "
                f"False for losses."
            )
        self.higher_is_better = None if higher_is_better is None else bool(higher_is_better)
        self.memory: Any = None
        self.epoch = 0
        self.is_pruned = False  # whether fossils were judged by themselves, as the rate had fallen
        self.history: list[Event] = []
        self.ledger, self.prices = Ledger(peak_params=model.total_params), prices
        """costs by phase; the seconds of `training` are your loop's, from one step to the next"""
        self._resumed = time.perf_counter()
        self.pending_optimizer: OptimizerSnapshot | None = None
        self.average: keeping.Average | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []  # on steps of the optimisers
        self._follower = processes.Follower(model)
        self._is_split = self._is_passed_by = (
            False  # processes have examples of their own; a compiled copy is trained
        )
        self._evaluate: Evaluate | None = None  # what the last step measured with
        self.run: str | None = (
            None  # name of the run that was last recorded, which its folder has too
        )
        self._recorder: keeping.Recorder | None = None

    @property
    def flops(self) -> int | None:
        """FLOPs of one example forward through the bare host; None if they are not known."""
        return None if self.prices is None else self.prices.whole

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to build an optimiser from."""
        return self.model.parameters()

    def attach(self, optimizer: Any, scheduler: Any = None, *, seed_lr: float = 1.0) -> None:
        """Let the optimiser, or each of a list, follow the model: seeds enter and leave, other
        state stays to the bit.

        Pass the scheduler, or a list, if it exists already. Seeds have the settings of the host's
        group, and learn at `seed_lr` times its rate. Of several optimisers, the first one's rate
        and steps count.
        """
        refuse_wrapped(self.model)
        link = self.model.attach(optimizer, scheduler=scheduler, seed_lr=seed_lr)
        self._resumed = time.perf_counter()
        keeping.settle_optimizer(self)
        for hook in self._hooks:
            hook.remove()
        optimizers = [each.optimizer for each in link.all]
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        self._hooks += [each.register_step_post_hook(self._after_step) for each in optimizers]
        self._follower.follow()

    def ema(self, decay: float) -> keeping.Average:
        """An average of all weights, seeds included, that follows every optimiser step; see
        `Average.applied`.
        """
        if self.average is None:
            self.average = keeping.Average(self.model, decay)
        elif decay != self.average.decay:
            raise SettingError(
                f"this garden has an average of decay {self.average.decay}, and ema "
                f"asks for {decay}."
            )
        return self.average

    def step(self, evaluate: Evaluate) -> list[Event]:
        """Measure the epoch that was trained, decide, and make the model ready for the next one."""
        if (link := self.model.link) is None:
            raise OptimizerError(
                "no optimiser is attached, so seeds cannot learn; call attach(optimizer) first."
            )
        epoch = self.epoch + 1
        with self._together():
            idle = reporting.warn_of_idle_step(link, epoch)
            told = self._tell([*self._measure(evaluate, epoch, link), *idle])
            self.epoch, self._evaluate = (
                epoch,
                evaluate,
            )  # that much has happened, even if the policy fails now
            events = [*self._decide(epoch, link), *tell_changes(0, epoch, self.model.tick())]
        told += self._tell(events)
        self._resumed = time.perf_counter()
        return told

    def prune(self, evaluate: Evaluate) -> list[Event]:
        """Remove fossils that do not pay: now, where no falling rate makes `step` do it."""
        with self._together():
            judged, _ = self._prune(evaluate, self.epoch, self._values(evaluate, is_base=True)[0])
        return self._tell(judged)

    def report(self, evaluate: Evaluate | None = None) -> GrowthReported:
        """What all that grew, and each part, is worth now; measured as in the last `step` unless
        you say how.
        """
        return reporting.report_growth(self, evaluate or self._evaluate)

    def shadow(self, closure: Callable[[], Tensor]) -> None:
        """Train TRAINING seeds:

        call after your backward, with a closure that returns the loss of the same batch.
        """
        if any(
            report.stage is SeedStage.TRAINING for report in self.model.get_slot_reports().values()
        ):
            with self.model.shadow():
                closure().backward()

    def harvest(self) -> nn.Module:
        """The grown network as a plain module of the host's class, without live seeds; its cost
        ends the history.
        """
        self._warn_of_left_out()
        plain = harvest(self.model)
        closed = close_ledger(0, self.model.settings.seed, self.ledger)
        self.history = [event for event in self.history if not isinstance(event, LedgerClosed)]
        self._tell([closed if self.flops is not None else replace(closed, flops={})])
        return plain

    def export(self, folder: str | Path) -> Path:
        """Write the harvested weights and a source file that rebuilds the network without esper."""
        self._warn_of_left_out()
        return export_network(self.model, Path(folder)) if processes.is_first() else Path(folder)

    def _warn_of_left_out(self) -> None:
        self._tell(
            [h for h in reporting.warn_of_left_out(self.model, self.epoch) if h not in self.history]
        )

    def save(self, folder: str | Path) -> Path:
        """Write all that `esper.load` needs to go on, optimiser included; of several processes the
        first one writes.
        """
        keeping.refuse_applied(self.average)
        if not processes.is_first():
            return Path(folder)
        averages = None if self.average is None else self.average.tensors()
        return save_network(
            self.model, Path(folder), keeping.describe(self), averages, self.pending_optimizer
        )

    def restore(self, folder: str | Path) -> None:
        """Become what `save` wrote, in place: the model, optimiser and average that you hold stay
        the same objects.

        Settings and limits stay those of this garden. The scheduler is yours to restore unless it
        was attached.
        """
        keeping.refuse_applied(self.average)
        processes.gather(lambda: None)  # the first process may be saving still
        keeping.take(
            self, *restore_network(self.model, Path(folder), partial(keeping.check, garden=self))
        )
        self._settle([])
        self._resumed = time.perf_counter()
        if (recorder := self._recorder) is not None:  # its folder holds this history, no more
            self.run = recorder.run
            self.record(recorder.folder, track=recorder.track)

    def record(self, folder: str | Path | None, *, track: Sequence[TrackerName] = ()) -> None:
        """Write a run folder, with all that has happened so far, for `esper watch`, `serve` and
        `report`; None ends it.

        The folder is a new one, or that of the same run: save and load the garden, and it goes on
        from there. `track` names "tensorboard", "wandb" or both. Of several processes the first one
        writes.
        """
        before, self._recorder = self._recorder, None
        if before is not None:
            before.close()
        if folder is not None and processes.is_first():
            try:
                self._recorder = keeping.Recorder(self, Path(folder), track)
            except Exception:
                self._recorder = before and keeping.Recorder(
                    self, before.folder, before.track
                )  # which goes on
                raise
            self.run = self._recorder.run

    def summary(self) -> str:
        """Slots, stages, parameters and evidence as a table to print, and the last report."""
        found = [event for event in self.history if isinstance(event, GrowthReported)]
        return "\n".join([reporting.summarize(self.model, self.epoch), *map(str, found[-1:])])

    def _tell(self, told: Sequence[Event]) -> list[Event]:
        """Keep events, with the names of their modules, and record them."""
        events = name_modules(self.model, told)
        self.history.extend(events)
        if self._recorder is not None:
            for event in events:
                self._recorder.sink.write(event)
        return events

    @contextmanager
    def _together(self) -> Iterator[None]:
        """All processes hold the same network before it is measured, and after it has changed."""
        refuse_wrapped(self.model)
        keeping.refuse_applied(self.average)
        processes.share(self.model.buffers())
        processes.require_equal(self.model)
        before = compiled_key(self.model)
        yield
        self._settle(before)

    def _settle(self, before: list[object]) -> None:
        """Let what is new be followed, and a compiled copy be compiled anew if the structure
        changed.
        """
        self._follower.follow()
        if self._is_passed_by and compiled_key(self.model) != before:
            forget_compiled()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.average is not None:
            self.average.begin_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.average is not None:
            self.average.end_step(optimizer, len(self._hooks) // 2)

    def _measure(self, evaluate: Evaluate, epoch: int, link: OptimizerLink) -> list[Event]:
        started = time.perf_counter()
        base, sign = self._values(evaluate, is_base=True)
        reports = self.model.get_slot_reports()
        shadowed = {
            s: self.model.at_full_strength
            for s, r in reports.items()
            if r.stage is SeedStage.TRAINING
        }
        ablated = {
            s: self.model.slot_off for s, r in reports.items() if r.stage is SeedStage.PROBATIONARY
        }
        values = {}
        for slot_id, switch in {**shadowed, **ablated}.items():
            with switch(slot_id):
                values[slot_id], _ = self._values(evaluate)
            measure_pairs(
                better=base, than=values[slot_id]
            )  # all evidence is sound before any of it is taken
        again = (
            self._values(evaluate)[0] if reporting.looks_unpaired(base, values.values()) else base
        )
        reporting.charge_epoch(
            self, link, started, len(base), list(shadowed), len(ablated) + (again is not base)
        )
        self.model.read_gradients()
        for slot_id, other in values.items():
            self.model.record_counterfactual(
                slot_id, *((other, base) if slot_id in shadowed else (base, other))
            )
        judged, hints = list[Event](), reporting.warn_of_unpaired(base, again, epoch)
        if self.model.settings.prunes and not self.is_pruned and link.has_rate_fallen:
            judged, base = self._prune(evaluate, epoch, base)
            self.is_pruned = True
        loss, score = (float(base.mean()), None) if sign > 0 else (None, -float(base.mean()))
        flops = None if self.flops is None else self.ledger.flops
        measured = HostEpoch(
            0, epoch, loss, self.model.total_params, held_out_score=score, flops=flops
        )
        return [measured, *tell_seeds(0, epoch, self.model.get_slot_reports()), *judged, *hints]

    def _prune(self, evaluate: Evaluate, epoch: int, base: Tensor) -> tuple[list[Event], Tensor]:
        """What was judged, and the values of the network that is left; `base` are those of the
        present one.
        """
        with reporting.booked(self, evaluate) as (measure, found):
            verdicts, left = prune(self.model, lambda: measure()[0][None], base[None])
            again = measure()[0] if reporting.looks_unpaired(base, found) else left[0]
        hints = reporting.warn_of_doubt(self.model, verdicts, epoch)
        hints += reporting.warn_of_unpaired(left[0], again, epoch)
        return [*tell_fossils(0, epoch, verdicts), *hints], left[0]

    def _values(self, evaluate: Evaluate, *, is_base: bool = False) -> tuple[Tensor, float]:
        """Losses (lower is better) of all processes' examples, and the sign that turns them back
        into your scale.
        """
        parts, signs = zip(*processes.gather(partial(self._own_values, evaluate)), strict=True)
        # whether processes have examples of their own; those that all of them measured count once
        if is_base:
            alike = [
                p.shape == parts[0].shape and torch.allclose(p, parts[0], rtol=1e-3) for p in parts
            ]
            self._is_split = self._is_split or not all(
                alike
            )  # once is enough: all may be right by chance
        return torch.cat(parts) if self._is_split else parts[0], signs[0]

    def _own_values(self, evaluate: Evaluate) -> tuple[Tensor, float]:
        if not callable(evaluate):
            raise MeasurementError(
                f"evaluate is a {type(evaluate).__name__}; pass the function evaluate itself."
            )
        with undisturbed(self.model):
            return as_losses(evaluate(), self.higher_is_better)

    def _decide(self, epoch: int, link: OptimizerLink) -> list[Event]:
        started = time.perf_counter()
        events: list[Event] = []
        while True:
            view = self.model.view()
            ask = partial(
                self.policy.decide, None, compute_batch_masks([view]), [view.reports], self.memory
            )
            actions, memory = processes.gather(
                ask if processes.is_first() else lambda: (None, None)
            )[0]
            op, slot, blueprint, blend = (int(index) for index in np.asarray(actions)[0])
            events += act(self.model.act, self.model.space, (op, slot, blueprint, blend), 0, epoch)
            self.memory = memory
            if op == OP_WAIT or not getattr(self.policy, "is_plan", False):
                break
            self.memory = self.policy.ask_again(memory)  # type: ignore[attr-defined]  # plans have it
        self.ledger.settle([Charge("policy", 1, 0)], time.perf_counter() - started)
        return events + reporting.warn_of_low_rate(link, events, epoch)


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    policy: str | Callable[[HostFacts], Policy] | None = None,
) -> Garden:
    """The garden that was saved to `folder`, around a fresh instance of the same model.

    Build the optimiser as before and `attach` it: it gets its state back. Pass your own policy
    again; another forgets.
    """

    def check(extra: dict[str, Any]) -> None:
        keeping.check(extra)
        if policy is None and not isinstance(parse(extra["policy"]), Rule):
            raise UnknownNameError(
                "policy", extra["policy"], RULES, "Pass your own again: policy=..."
            )

    refuse_wrapped(model)
    (network, optimizer), average, extra = load_network(Path(folder), model, check)
    garden = _tend(
        network,
        extra["policy"] if policy is None else policy,
        extra["higher_is_better"],
        keeping.prices_of(extra),
    )
    keeping.take(garden, optimizer, average, extra)
    return garden
