"""Parameters entering and leaving the user's own optimiser.

The state of all other parameters is never touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from esper.leyline.errors import OptimizerError, SettingError, is_number
from esper.leyline.rates import is_low

PER_GROUP_SCHEDULERS = (
    "LambdaLR, MultiplicativeLR, StepLR, MultiStepLR, ConstantLR, LinearLR, "
    "ExponentialLR, PolynomialLR, "
    "CosineAnnealingLR, CosineAnnealingWarmRestarts, OneCycleLR"
)
"""Schedulers whose per-group lists can be extended; others are refused by name."""

Originals = Mapping[nn.Parameter, nn.Parameter]
Group = tuple["OptimizerLink", int]


class OptimizerLink:
    """One optimiser that follows one growing network: parameter groups per slot, empty until a seed
    is planted.

    A slot has one group like the host's largest, and one like each other group that its module has
    parameters in: a copy inherits the settings of what it copies. Of several optimisers the first
    one's link leads those of `others`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: nn.Module,
        sources: Mapping[str, nn.Module],
        *,
        scheduler: Any = None,
        seed_lr: float = 1.0,
        follows_rates: bool = True,
    ):
        """`sources` are the modules that a copy in each slot would copy; `follows_rates` watches
        every step.
        """
        self.optimizer, self.scheduler, self.seed_lr, self.sources = (
            optimizer,
            scheduler,
            seed_lr,
            sources,
        )
        self.others: tuple[OptimizerLink, ...] = ()
        known = {
            id(parameter) for parameter in host.parameters()
        }  # what grew would make another group the largest
        sizes = [
            sum(p.numel() for p in group["params"] if id(p) in known)
            for group in optimizer.param_groups
        ]
        self.home = sizes.index(max(sizes))
        self.groups: dict[
            str, dict[int, int]
        ] = {}  # slot -> {group of the host: the slot's own like it}
        owner = {
            id(p): index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        for slot_id, source in sources.items():
            others = {owner[id(p)] for p in source.parameters() if id(p) in owner} - {self.home}
            self.groups[slot_id] = {
                like: self._add_group(like) for like in (self.home, *sorted(others))
            }
        self.slot_groups = [number for own in self.groups.values() for number in own.values()]
        home = optimizer.param_groups[self.home]
        self.peak_rate = max(float(home[key]) for key in ("lr", "initial_lr") if key in home)
        self.was_high = False  # whether a step was taken at a rate that is not low
        self.follows_rates, self.steps = follows_rates, 0
        self.note_gradients: Callable[[], None] = lambda: None
        self._handles = list[torch.utils.hooks.RemovableHandle]()
        if (
            follows_rates
        ):  # not where rates are tensors on a device, which nobody may read back inside an epoch
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._follow(1.0)))

    @property
    def rate(self) -> float:
        """The host's learning rate as its plan has it now."""
        return float(self.optimizer.param_groups[self.home]["lr"])

    @property
    def is_rate_low(self) -> bool:
        return is_low(self.rate, self.peak_rate)

    @property
    def has_rate_fallen(self) -> bool:
        """Whether the rate is low and was not always:

        at the start of a warm-up it has not fallen.
        """
        return self.is_rate_low and self.was_high

    @property
    def all(self) -> tuple["OptimizerLink", ...]:
        return (self, *self.others)

    def owners(self) -> dict[int, Group]:
        """Link and number of the group that each parameter is in."""
        groups = [
            (link, number)
            for link in self.all
            for number in range(len(link.optimizer.param_groups))
        ]
        return {
            id(p): (link, n) for link, n in groups for p in link.optimizer.param_groups[n]["params"]
        }

    def adopt(
        self,
        slot_id: str,
        parameters: Iterable[nn.Parameter],
        originals: Originals,
        *,
        is_host: bool = False,
    ) -> None:
        """A seed is planted: its parameters start without history, each in the slot's group like
        its original's.

        With `is_host` they are a fossil's that is older than this optimiser, and join the
        original's group itself.
        """
        owner = self.owners()
        for parameter in parameters:
            if is_host and id(parameter) in owner:
                continue
            link, like = owner.get(id(originals.get(parameter))) or self._choose(
                slot_id, parameter, owner
            )
            own = link.groups[slot_id]
            group = link.optimizer.param_groups[like if is_host else own.get(like, own[link.home])]
            group["params"].append(parameter)
            if isinstance(
                link.optimizer, torch.optim.Adagrad
            ):  # others make their state at the first step
                options = {
                    key: group[key]
                    for key in ("initial_accumulator_value", "foreach", "fused")
                    if key in group
                }
                link.optimizer.state.update(type(link.optimizer)([parameter], **options).state)

    def _choose(self, slot_id: str, parameter: nn.Parameter, owner: Mapping[int, Group]) -> Group:
        """Who trains a parameter without original:

        who trains most of its rank in the slot's module, or anywhere.
        """
        if not self.others:
            return self, self.home
        groups = [group for link in self.all for group in link.optimizer.param_groups]
        trained = [
            p for group in groups for p in group["params"] if id(p) in owner
        ]  # not this seed's own
        alike = [p for p in trained if p.dim() == parameter.dim()]
        inside = {*map(id, self.sources[slot_id].parameters())}
        # Muon takes matrices only; what trains vectors takes parameters of any rank
        for among in (
            [p for p in alike if id(p) in inside],
            alike,
            [p for p in trained if p.dim() == 1],
        ):
            sizes = [sum(p.numel() for p in among if owner[id(p)][0] is link) for link in self.all]
            if any(sizes):
                return (link := self.all[sizes.index(max(sizes))]), link.home
        return self, self.home

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """A seed is culled: its parameters and their state leave."""
        gone = {id(parameter) for parameter in parameters}
        for link in self.all:
            for group in link.optimizer.param_groups:
                group["params"][:] = [p for p in group["params"] if id(p) not in gone]
            for parameter in [p for p in link.optimizer.state if id(p) in gone]:
                del link.optimizer.state[parameter]

    def commit(self, slot_id: str) -> None:
        """A seed is host now: its parameters move to the host's groups, state and all."""
        for link in self.all:
            for like, own in link.groups[slot_id].items():
                moving = link.optimizer.param_groups[own]["params"]
                link.optimizer.param_groups[like]["params"].extend(moving)
                moving.clear()

    def detach(self) -> None:
        """Stop following; the groups stay, since a scheduler may already count on them."""
        for handle in [handle for link in self.all for handle in link._handles]:
            handle.remove()

    def _add_group(self, like: int) -> int:
        """An empty group with the settings of another; returns its number."""
        home = self.optimizer.param_groups[like]
        for group in (
            self.optimizer.param_groups
        ):  # names given at construction do not stay true while parameters move
            group.pop("param_names", None)
        self.optimizer.add_param_group({"params": [], **_options(home)})
        for name in (
            "base_lrs",
            "_last_lr",
            "lr_lambdas",
        ):  # the scheduler's plan for the host is the slot's too
            values = getattr(self.scheduler, name, None)
            if isinstance(values, list) and values:
                values.append(values[like])
        return len(self.optimizer.param_groups) - 1

    def _before_step(self, *_: Any) -> None:
        """Seeds have the settings of the host's group, whoever set them; their multiple acts on one
        step.
        """
        self.steps += 1
        self.note_gradients()
        self.peak_rate = max(self.peak_rate, self.rate)
        self.was_high |= not self.is_rate_low
        self._follow(self.seed_lr)

    def _follow(self, multiple: float) -> None:
        groups = self.optimizer.param_groups
        for like, place in (pair for own in self.groups.values() for pair in own.items()):
            options = _options(groups[like])
            groups[place].update(options, lr=options["lr"] * multiple)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings, for another one to have."""
    found = {
        key: value for key, value in group.items() if key not in ("params", "name", "param_names")
    }
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()
    }


def link_optimizers(
    optimizer: Any,
    before: OptimizerLink | None,
    host: nn.Module,
    sources: Mapping[str, nn.Module],
    **options: Any,
) -> OptimizerLink:
    """Let one optimiser, or each of several, follow a network in place of `before`; refused with
    all as they were.
    """
    optimizers, plans = (
        _unwrap(optimizer, "optimizer"),
        _unwrap(options.pop("scheduler", None), "scheduler"),
    )
    if not is_number(rate := options.get("seed_lr", 1.0)) or not rate > 0:
        raise SettingError(
            f"seed_lr must be above 0, got {rate!r}; it is a multiple of the host's rate."
        )
    if before is not None and {*map(id, optimizers)} & {id(link.optimizer) for link in before.all}:
        raise OptimizerError("this optimiser is already attached; attach(optimizer) once only.")
    _refuse_unfit(optimizers, host, plans)
    plan_of = {id(plan.optimizer): plan for plan in plans}
    first, *others = [
        OptimizerLink(o, host, sources, scheduler=plan_of.get(id(o)), **options) for o in optimizers
    ]
    first.others = tuple(others)
    return first


def _unwrap(given: Any, name: str) -> list[Any]:
    """All that was given, without accelerate's wrappers: their own hooks would never be called."""
    found = list(given) if isinstance(given, list | tuple) else [given] if given is not None else []
    return [
        getattr(each, name) if type(each).__module__.startswith("accelerate.") else each
        for each in found
    ]


def _refuse_unfit(optimizers: Sequence[Any], host: nn.Module, plans: Sequence[Any]) -> None:
    whole = "LBFGS", "ZeroRedundancyOptimizer"
    unfit = [
        o
        for o in optimizers
        if not isinstance(o, torch.optim.Optimizer) or type(o).__name__ in whole
    ]
    if unfit or not optimizers:
        name = type(unfit[0]).__name__ if unfit else "[]"
        rule = "parameters enter and leave one by one, and the optimiser must treat them so"
        way_out = "Use SGD, Adam, AdamW or another param_groups optimiser."
        raise OptimizerError(f"{name} cannot follow a growing network: {rule}. {way_out}")
    owned = [id(p) for each in optimizers for group in each.param_groups for p in group["params"]]
    if len(owned) != len(known := set(owned)):
        raise OptimizerError(
            "two of these optimisers own the same parameter; give each one parameters of its own."
        )
    if missing := [
        name for name, p in host.named_parameters() if p.requires_grad and id(p) not in known
    ]:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        way_out = (
            "Build it from garden.parameters(), or freeze what it should not train, "
            "and attach it again."
        )
        count = f"{len(missing)} of the host's trainable parameters ({shown})"
        raise OptimizerError(f"what you attach does not own {count}. {way_out}")
    planned = {id(plan.optimizer) for plan in plans if hasattr(plan, "optimizer")}
    if any(
        "initial_lr" in group
        for each in optimizers
        if id(each) not in planned
        for group in each.param_groups
    ):
        way_out = "Pass it: attach(optimizer, scheduler), or create it after attach(optimizer)."
        what = (
            "a scheduler drives this optimiser already and would not know the slots' "
            "parameter groups"
        )
        raise OptimizerError(f"{what}. {way_out}")
    for plan in plans:
        if type(plan) not in [
            getattr(schedulers, name) for name in PER_GROUP_SCHEDULERS.split(", ")
        ]:
            what = f"scheduler {type(plan).__name__} cannot be extended to a slot's parameter group"
            way_out = (
                "or create the scheduler after attach(optimizer) and leave it out of the call."
            )
            raise OptimizerError(f"{what}. Use one of {PER_GROUP_SCHEDULERS}, {way_out}")
    if planned - {id(each) for each in optimizers}:
        raise OptimizerError(
            "the scheduler drives another optimiser; attach the two that belong together."
        )
