"""Parameters entering and leaving the user's own optimiser. The state of all other parameters is never touched."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from esper.leyline.errors import OptimizerError, SettingError

PER_GROUP_SCHEDULERS = (
    "LambdaLR, MultiplicativeLR, StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR, PolynomialLR, "
    "CosineAnnealingLR, CosineAnnealingWarmRestarts, OneCycleLR"
)
"""Schedulers whose per-group lists can be extended; others are refused by name."""

LOW_RATE = 0.1
"""From this share of the peak rate down a new seed learns little, and held-out losses tell what a fossil is worth."""


def is_low(rate: float, peak: float) -> bool:
    """Whether a rate has come down to `LOW_RATE`; 3e-5 is a tenth of 3e-4, whatever floating point says."""
    return rate <= LOW_RATE * peak * (1 + 1e-6)


class OptimizerLink:
    """One optimiser that follows one growing network: parameter groups per slot, empty until a seed is planted.

    A slot has one group like the host's largest, and one like each other group that its module has parameters in: a
    copy takes over the settings of what it copies.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: nn.Module,
        sources: Mapping[str, nn.Module],
        note_gradients: Callable[[], None] = lambda: None,
        *,
        scheduler: Any = None,
        seed_lr: float = 1.0,
        follows_rates: bool = True,
    ):
        """`sources` are the modules that a copy in each slot would copy.

        `follows_rates` watches every step: `note_gradients`, the seeds' rates, the hint about low rates. It is off
        where the rates are tensors on a device, which nobody may read back inside an epoch.
        """
        if not seed_lr > 0:
            raise SettingError(f"seed_lr must be above 0, got {seed_lr!r}; it is a multiple of the host's rate.")
        _refuse_unfit(optimizer, host, scheduler)
        self.optimizer, self.scheduler, self.seed_lr = optimizer, scheduler, seed_lr
        sizes = [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]
        self.home = sizes.index(max(sizes))
        self.groups: dict[str, dict[int, int]] = {}
        """slot -> {group of the host: the slot's own like it}"""
        owner = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for slot_id, source in sources.items():
            others = {owner[id(p)] for p in source.parameters() if id(p) in owner} - {self.home}
            self.groups[slot_id] = {like: self._add_group(like) for like in (self.home, *sorted(others))}
        home = optimizer.param_groups[self.home]
        self.peak_rate = max(float(home[key]) for key in ("lr", "initial_lr") if key in home)
        self.was_high = False
        """whether a step was taken at a rate that is not low"""
        self.follows_rates, self._note_gradients = follows_rates, note_gradients
        self._planned: dict[int, Any] = {}
        self.steps = 0
        self._handles = []
        if follows_rates:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    @property
    def rate(self) -> float:
        """The host's learning rate as its plan has it now."""
        return float(self.optimizer.param_groups[self.home]["lr"])

    @property
    def is_rate_low(self) -> bool:
        return is_low(self.rate, self.peak_rate)

    @property
    def has_rate_fallen(self) -> bool:
        """Whether the rate is low and was not always: at the start of a warm-up it has not fallen."""
        return self.is_rate_low and self.was_high

    def owned(self) -> set[int]:
        """Parameters of all groups, by identity."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def adopt(
        self,
        slot_id: str,
        parameters: Iterable[nn.Parameter],
        originals: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        """A seed is planted: its parameters start without history, each in the slot's group like its original's."""
        owner = {id(p): index for index, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for parameter in parameters:
            original = (originals or {}).get(parameter)
            like = self.home if original is None else owner.get(id(original), self.home)
            place = self.groups[slot_id].get(like, self.groups[slot_id][self.home])
            group = self.optimizer.param_groups[place]
            group["params"].append(parameter)
            self._make_state([parameter], group)

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """A seed is culled: its parameters and their state leave."""
        gone = {id(parameter) for parameter in parameters}
        for group in self.optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if id(p) not in gone]
        for parameter in [p for p in self.optimizer.state if id(p) in gone]:
            del self.optimizer.state[parameter]

    def commit(self, slot_id: str) -> None:
        """A seed is host now: its parameters move to the host's groups, state and all."""
        for like, own in self.groups[slot_id].items():
            moving = self.optimizer.param_groups[own]["params"]
            self.optimizer.param_groups[like]["params"].extend(moving)
            moving.clear()

    def claim_fossil(self, parameters: Iterable[nn.Parameter], originals: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """A fossil that is older than this optimiser belongs to the host's groups, a copy to those of its original."""
        owner = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in parameters:
            if id(parameter) not in owner:
                group = owner.get(id(originals.get(parameter)), self.optimizer.param_groups[self.home])
                group["params"].append(parameter)
                self._make_state([parameter], group)

    def detach(self) -> None:
        """Stop following; the groups stay, since a scheduler may already count on them."""
        for handle in self._handles:
            handle.remove()

    def _make_state(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if parameters and isinstance(self.optimizer, torch.optim.Adagrad):  # others do it at the first step
            accepted = ("initial_accumulator_value", "foreach", "fused")
            options = {key: group[key] for key in accepted if key in group}
            self.optimizer.state.update(type(self.optimizer)(parameters, **options).state)

    def _own_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for own in self.groups.values():
            for place in own.values():
                yield place, self.optimizer.param_groups[place]

    def _add_group(self, like: int) -> int:
        """An empty group with the settings of another; returns its number."""
        home = self.optimizer.param_groups[like]
        options = {key: value for key, value in home.items() if key not in ("params", "name", "param_names")}
        options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
        home.pop("param_names", None)  # names given at construction cannot be kept true while parameters move
        self.optimizer.add_param_group({"params": [], **options})
        for name in ("base_lrs", "_last_lr", "lr_lambdas"):  # the scheduler's plan for the host is the slot's too
            values = getattr(self.scheduler, name, None)
            if isinstance(values, list) and values:
                values.append(values[like])
        return len(self.optimizer.param_groups) - 1

    def _before_step(self, *_: Any) -> None:
        """The seeds' multiple acts on one step; the plan's rates come back after it."""
        self.steps += 1
        self._note_gradients()
        self.peak_rate = max(self.peak_rate, self.rate)
        self.was_high |= not self.is_rate_low
        self._planned = {place: group["lr"] for place, group in self._own_groups()}
        for place, group in self._own_groups():
            group["lr"] = self._planned[place] * self.seed_lr

    def _after_step(self, *_: Any) -> None:
        for place, rate in self._planned.items():
            self.optimizer.param_groups[place]["lr"] = rate


def _refuse_unfit(optimizer: Any, host: nn.Module, scheduler: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot follow a growing network: parameters enter and leave one by one, "
            "so the optimiser must treat them one by one. Use SGD, Adam, AdamW or another param_groups optimiser."
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in host.named_parameters() if p.requires_grad and id(p) not in owned]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise OptimizerError(
            f"this optimiser does not own {len(missing)} of the host's trainable parameters ({shown}). "
            "Build it from garden.parameters(), or freeze what it should not train, and attach it again."
        )
    if scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        raise OptimizerError(
            "a scheduler drives this optimiser already and would not know the slots' parameter groups. Pass it: "
            "attach(optimizer, scheduler), or create it after attach(optimizer)."
        )
    if scheduler is None:
        return
    if type(scheduler) not in [getattr(schedulers, name) for name in PER_GROUP_SCHEDULERS.split(", ")]:
        raise OptimizerError(
            f"scheduler {type(scheduler).__name__} cannot be extended to a slot's parameter group. Use one of "
            f"{PER_GROUP_SCHEDULERS}, or create the scheduler after attach(optimizer) and leave it out of the call."
        )
    if scheduler.optimizer is not optimizer:
        raise OptimizerError("the scheduler drives another optimiser; attach the two that belong together.")
