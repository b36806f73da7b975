"""A growing model between two epochs of your own loop: it measures, asks a policy, and acts.

How a model becomes a garden is in `grow`; what it costs in `books`; what is saved in `keeping`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.episodes import (
    act,
    ask_policy,
    decide,
    decision_flops,
    facts_of,
    name_modules,
    report_changes,
    report_fossils,
    report_seeds,
)
from esper.garden import hints, keeping, processes, reaching
from esper.garden.average import Average
from esper.garden.books import Books
from esper.garden.by_hand import PlantingByHand
from esper.garden.controls import Start
from esper.garden.explaining import Explaining
from esper.garden.measuring import Evaluate, Evaluation, LossMeter, read_signals, track
from esper.garden.recorder import Recorder, describe_start
from esper.garden.report import compose_report, measure_growth, summarize
from esper.garden.taking_home import TakingHome
from esper.garden.telling import select_news
from esper.garden.undoing import refuse_broken, whole, whole_or_refused
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.optimizer_saving import OptimizerSnapshot
from esper.kasmina.pricing import HostFlops
from esper.kasmina.probing import buffers_kept, refuse_wrapped
from esper.kasmina.pruning import prune
from esper.kasmina.saving import restore_network, save_network
from esper.leyline.errors import MeasurementError, SettingError
from esper.leyline.factored_actions import OP_GERMINATE, OP_NAMES
from esper.leyline.legality import GrowthView
from esper.leyline.stages import SeedStage
from esper.runtime.executors.compiling import forget_compiled
from esper.runtime.executors.structure import compiled_key
from esper.runtime.ledger import Ledger
from esper.tamiyo.policy_names import Chooser, build_policy, read_policy
from esper.tamiyo.readings import Sight
from esper.telemetry.curve_export import TrackerName
from esper.telemetry.events import ActionTaken, Event, GrowthReported, HostEpoch


class Garden(PlantingByHand, TakingHome, Explaining):
    """A growing model, and the policy that decides about it between two epochs of your loop.

    `esper.grow` makes one. Build the optimiser from `parameters`, `attach` it, train
    `garden.model` as you always do, and call `step` after every epoch. At the end `harvest` returns
    a plain network of the host's class.

    Attributes:
        model: the `MorphogeneticModel` to train; it is called like the host.
        policy: what decides; `policy_name` names it, `policy_digest` is that of its file, and
            `facts` is what it was built for.
        memory: what the policy remembers.
        by_hand: slots whose live seed no standing order keeps: `plant` planted it, or a policy
            before this one measured it and left it undecided.
        epoch: how many steps were made.
        history: every event so far.
        books: ledger and prices; `ledger` and `flops` are short for what is in them.
        average: what `ema` made, or None.
        loss_meter: training losses since the last step, where a framework's callback reports them.
        is_pruned: whether `step` judged fossils: the rate had fallen, or the last epoch came.
        is_broken: whether a change was broken off and could not be undone; it then refuses.
        run: name of the run that was last recorded, which its folder has too.
        pending_optimizer: a saved state that waits for `attach`, or None.
        verbose: whether `step` returns every event, or what changed the network and hints.
        start: weights and buffers as `esper.grow` found them, or None.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> _ = torch.manual_seed(0)
        >>> host = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> inputs, labels = torch.randn(32, 4), torch.arange(32) % 2
        >>> garden = esper.grow(host, slots="0", example=inputs, policy="schedule:epochs=0")
        >>> optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
        >>> garden.attach(optimizer)
        >>> def losses():
        ...     return nn.functional.cross_entropy(garden.model(inputs), labels, reduction="none")
        >>> for epoch in range(3):
        ...     optimizer.zero_grad()
        ...     losses().mean().backward()
        ...     optimizer.step()
        ...     events = garden.step(losses)
        >>> print(garden.history[1])
        epoch 1: GERMINATE lora (linear) in r0c0 (0)
        >>> garden.model.active_seeds, garden.model.fossilized_seeds
        (0, 1)
        >>> type(garden.harvest()).__name__
        'Sequential'
    """

    def __init__(
        self,
        model: MorphogeneticModel,
        policy: Chooser = "heuristic",
        higher_is_better: bool | None = None,
        prices: HostFlops | None = None,
    ):
        """Tend a model that can grow already; `esper.grow` makes one of any model.

        Args:
            model: host and slots.
            policy: name of a rule, a policy's file, or a function from `HostFacts` to a policy.
            higher_is_better: whether `evaluate` returns scores; by default bools are scores and
                numbers are losses.
            prices: FLOPs of one example in the bare host; None where they cannot be counted.
        """
        self.model = model
        for slot_id in model.slot_config.slot_ids:
            model.slot(slot_id).is_noted = True
        self.facts = facts_of(model, model.settings.epochs)
        policy = read_policy(policy)
        self.policy = build_policy(policy, self.facts)
        self.policy_name = keeping.name_policy(policy, self.policy)
        self.policy_digest = keeping.digest_policy(policy)
        self._evaluation = Evaluation(model, higher_is_better)
        self.higher_is_better = self._evaluation.higher_is_better
        self.memory: Any = None
        self.by_hand: set[str] = set()
        self.epoch = 0
        self.is_pruned = False
        self.is_broken = False
        self.history: list[Event] = []
        self.books = Books(Ledger(peak_params=model.total_params), prices)
        self.pending_optimizer: OptimizerSnapshot | None = None
        self.average: Average | None = None
        self.loss_meter = LossMeter()
        self.run: str | None = None
        self.verbose = False
        self.start: Start | None = None
        self._recorder: Recorder | None = None
        # on steps of the optimisers, one before and one after for each
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._follower = processes.Follower(model)
        # of the last decision
        self.questions = []
        self.choices = []
        # what the last step measured with
        self._evaluate: Evaluate | None = None

    @property
    def ledger(self) -> Ledger:
        """Costs by phase; the seconds of `training` are your loop's, from one step to the next."""
        return self.books.ledger

    @property
    def flops(self) -> int | None:
        """FLOPs of one example forward through the bare host; None if they are not known."""
        return self.books.flops

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to build an optimiser from."""
        return self.model.parameters()

    @torch.inference_mode(mode=False)
    def attach(
        self, optimizer: Any, scheduler: Any = None, *, seed_lr: float | None = None
    ) -> None:
        """Let the optimiser follow the model: seeds enter and leave, all other state stays.

        Args:
            optimizer: one, or a list; of several, the first one's rate and steps count.
            scheduler: one, or a list, if it exists already. Any scheduler that you create after
                `attach` works; do not pass it.
            seed_lr: seeds learn at this multiple of the rate of the host's group and have its
                other settings; by default it is that of the save, or 1.
        """
        refuse_wrapped(self.model)
        link = self.model.attach(optimizer, scheduler=scheduler, seed_lr=seed_lr)
        self.books.resume()
        keeping.settle_optimizer(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for member in link.all:
            self._hooks.append(member.optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(member.optimizer.register_step_post_hook(self._after_step))
        self._follower.follow()

    @torch.inference_mode(mode=False)
    def ema(self, decay: float) -> Average:
        """An average of all weights, seeds included, that follows every optimiser step.

        See `Average.applied` for how to use it. A second call returns the same average.
        """
        if self.average is None:
            self.average = Average(self.model, decay)
        elif decay != self.average.decay:
            raise SettingError(
                f"the average of this garden has decay {self.average.decay}; ema asks for {decay}."
            )
        return self.average

    @whole
    def step(self, evaluate: Evaluate, train_loss: float | Tensor | None = None) -> list[Event]:
        """Measure the epoch that was trained, decide, and make the model ready for the next one.

        Args:
            evaluate: a function without arguments. It returns held-out values of `garden.model`,
                one per example, always of the same examples in the same order. It runs in eval
                mode without gradients, once for the network and once more for each seed that is
                incubated or on probation.
            train_loss: mean training loss of the epoch, as `evaluate` counts a loss. With it the
                default rule sees when data are missing, and leaves the network alone.

        Returns:
            What changed the network, in order, and hints; print an event to read it. With
            `verbose` all that happened, which `history` always has.
        """
        link = self._require_optimizer()
        epoch = self.epoch + 1
        is_idle = epoch > 1 and link.follows_rates and not link.steps
        examples = self.books.count_examples(self.model, link)
        learnt = processes.mean_of(train_loss)
        reaching.refuse_unreached(self.model)
        with self._together():
            measured, view = self._measure(evaluate, epoch, link, examples, learnt)
            if is_idle:
                measured.append(hints.hint_of_idle_step(epoch))
            events = self._emit(measured)
            # that much has happened, even if the policy fails now
            self.epoch = epoch
            self._evaluate = evaluate
            decided = self._decide(view, epoch, link)
            decided += report_changes(0, epoch, self.model.tick())
        events += self._emit(decided)
        self.books.resume()
        return events if self.verbose else select_news(events)

    @whole
    def prune(self, evaluate: Evaluate) -> list[Event]:
        """Remove fossils that do not pay: now, where `step` does not do it by itself."""
        with self._together():
            base = self._evaluation.losses(evaluate, is_base=True)
            judged, _ = self._prune(evaluate, self.epoch, base.values)
        return self._emit(judged)

    @whole
    def report(self, evaluate: Evaluate | None = None) -> GrowthReported:
        """Measure what all that grew, and each part, is worth now.

        It is measured as in the last `step` unless you pass another `evaluate`.
        """
        evaluate = evaluate or self._evaluate
        if evaluate is None:
            way_out = "say how: garden.report(evaluate)"
            raise MeasurementError(f"no step has measured anything yet, so {way_out}.")
        measuring = self.books.measuring(self.model, partial(self._evaluation.losses, evaluate))
        # processes take over each other's buffers for as long as they measure
        with buffers_kept(self.model), self._together(), measuring as evaluations:
            growth = measure_growth(self.model, evaluations)
            base = evaluations.values[0]
            again = evaluations.repeat_in_doubt(base)
        if again is not None:
            for hint in hints.hint_of_unpaired(base, again, self.epoch):
                raise MeasurementError(str(hint))
        event = compose_report(self.model, self.books, self.epoch, growth)
        self._emit([event])
        return event

    def shadow(self, closure: Callable[[], Tensor]) -> None:
        """Train seeds that are TRAINING, in the shadow of the host.

        Call it after your backward pass, with a closure that returns the loss of the same batch.
        Where no seed is incubated it does nothing.
        """
        if self._evaluation.slots_at(SeedStage.TRAINING):
            with self.model.shadow():
                closure().backward()

    def save(self, folder: str | Path) -> Path:
        """Write all that `esper.load` needs to continue, optimiser included.

        Of several processes the first one writes.
        """
        refuse_broken(self)
        self._refuse_averages()
        if not processes.is_first():
            return Path(folder)
        averages = None if self.average is None else self.average.tensors()
        return save_network(
            self.model, Path(folder), keeping.describe(self), averages, self.pending_optimizer
        )

    @whole_or_refused
    def restore(self, folder: str | Path) -> None:
        """Become what `save` wrote, in place.

        The model, optimiser and average that you hold stay the same objects. Settings and limits
        stay those of this garden. The scheduler is yours to restore unless it was attached.
        """
        self._refuse_averages()
        processes.gather(lambda: None)  # the first process may be saving still
        check = partial(keeping.check_for, self)
        saved = restore_network(self.model, Path(folder), check)
        keeping.take(self, saved.optimizer, saved.average, saved.extra)
        self._settle([])
        self.books.resume()
        recorder = self._recorder
        if recorder is not None:
            # its folder holds this history and no more
            self.run = recorder.run
            self.record(recorder.folder, track=recorder.track)

    def record(self, folder: str | Path | None, *, track: Sequence[TrackerName] = ()) -> None:
        """Write a run folder, with all that has happened so far; None ends it.

        Args:
            folder: a new one, or that of the same run: save and load the garden, and it continues
                there. `esper watch`, `serve` and `report` read it. Of several processes the first
                one writes.
            track: "tensorboard", "wandb" or both, which get curves as well.
        """
        before = self._recorder
        self._recorder = None
        if before is not None:
            before.close()
        if folder is None or not processes.is_first():
            return
        try:
            self._recorder = self._open_recorder(Path(folder), track)
        except Exception:
            if before is not None:
                self._recorder = self._open_recorder(before.folder, before.track)
            raise
        self.run = self._recorder.run

    def __repr__(self) -> str:
        """The summary: what `print(garden)` and a notebook show."""
        return self.summary()

    def summary(self) -> str:
        """Slots, stages, parameters and evidence as a table to print, and the last report."""
        return summarize(self.model, self.epoch, self.history)

    # -- events ------------------------------------------------------------------------------------

    def _emit(self, happened: Sequence[Event]) -> list[Event]:
        """Keep events, with the names of their modules, and record them."""
        events = name_modules(self.model, happened)
        self.history.extend(events)
        if self._recorder is not None:
            self._recorder.write(events)
        return events

    def _open_recorder(self, folder: Path, track: Sequence[TrackerName]) -> Recorder:
        start = describe_start(self.model, self.policy_name)
        return Recorder(folder, track, run=self.run, start=start, history=self.history)

    # -- processes, optimisers and compiled copies -------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[None]:
        """All processes hold the same network before it is measured, and after it has changed."""
        refuse_wrapped(self.model)
        self._refuse_averages()
        processes.share(self.model.buffers())
        processes.require_equal(self.model)
        compiled_for = compiled_key(self.model) if self.books.is_passed_by else []
        yield
        self._settle(compiled_for)

    def _settle(self, compiled_for: list[object]) -> None:
        """Follow what is new; a compiled copy of another structure is compiled again."""
        self._follower.follow()
        if self.books.is_passed_by and compiled_key(self.model) != compiled_for:
            forget_compiled()

    def _refuse_averages(self) -> None:
        if self.average is not None:
            self.average.refuse_applied()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.average is not None:
            self.average.begin_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.average is not None:
            self.average.end_step(optimizer, len(self._hooks) // 2)

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(
        self,
        evaluate: Evaluate,
        epoch: int,
        link: OptimizerLink,
        examples: dict[str, int],
        train_loss: float | None,
    ) -> tuple[list[Event], GrowthView]:
        """Measure the network and its seeds, and charge that and the epoch that was trained.

        Returns what happened, and the network as it stands now.
        """
        started = time.perf_counter()
        reading = self._evaluation.read(evaluate)
        self.books.charge_epoch(self.model, examples, reading, started)
        reaching.begin_epoch(self.model)
        link.steps = 0
        self.model.read_gradients()
        for seed in reading.seeds:
            self.model.record_counterfactual(seed.slot.slot_id, seed.with_seed, seed.without_seed)
        base, sign = reading.base
        events: list[Event] = []
        settings = self.model.settings
        is_last = settings.epochs is not None and epoch >= settings.epochs
        is_time = is_last or link.has_rate_fallen
        if settings.prunes and not self.is_pruned and is_time:
            judged, base = self._prune(evaluate, epoch, base)
            events += judged
            self.is_pruned = True
        if reading.again is not None:
            events += hints.hint_of_unpaired(reading.base.values, reading.again, epoch)
        mean = float(base.mean())
        view = self.model.view()
        measured = HostEpoch(
            host=0,
            epoch=epoch,
            held_out_loss=mean if sign > 0 else None,
            params=view.params_used,
            train_loss=train_loss,
            held_out_score=None if sign > 0 else -mean,
            flops=self.books.flops_spent,
        )
        return [measured, *report_seeds(0, epoch, view.reports), *events], view

    def _prune(self, evaluate: Evaluate, epoch: int, base: Tensor) -> tuple[list[Event], Tensor]:
        """Judge every fossil; `base` are the losses of the network as it stands.

        Returns what happened, and the losses of the network that is left.
        """
        measuring = self.books.measuring(self.model, partial(self._evaluation.losses, evaluate))
        with measuring as evaluations:
            verdicts, rows = prune(
                self.model, lambda: evaluations.measure().values[None], base[None]
            )
            left = rows[0]
            again = evaluations.repeat_in_doubt(base)
        events: list[Event] = [*report_fossils(0, epoch, verdicts)]
        events += hints.hint_of_doubt(self.model, verdicts, epoch)
        if again is not None:
            events += hints.hint_of_unpaired(left, again, epoch)
        return events, left

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self, view: GrowthView, epoch: int, link: OptimizerLink) -> list[Event]:
        """Ask the policy about the network as it stands, and carry out what it wants."""
        started = time.perf_counter()
        events: list[Event] = []
        self.by_hand = {slot_id for slot_id in self.by_hand if view.reports[slot_id].is_live}
        horizon = self.model.settings.epochs
        self.questions = []
        self.choices = []

        @cache
        def look() -> Sight:
            return Sight(track(self.history, horizon, link, view), view, self.facts)

        for decision in decide(
            self.policy,
            view,
            self.memory,
            read_signals(self.history, horizon, link),
            look=self.model.view,
            ask=self._noting(processes.ask_first(ask_policy(self.policy, look)), look),
            by_hand=self.by_hand,
        ):
            self.choices.append(decision.choice)
            carry_out = partial(self.model.act, view=decision.view)
            events += act(carry_out, self.model.space, decision.choice, 0, epoch)
            self.memory = decision.memory
        self.books.charge_decision(decision_flops(self.policy), time.perf_counter() - started)
        taken = [event.op for event in events if isinstance(event, ActionTaken)]
        if OP_NAMES[OP_GERMINATE] in taken and link.is_rate_low:
            events.append(hints.hint_of_low_rate(link, epoch))
        return events
