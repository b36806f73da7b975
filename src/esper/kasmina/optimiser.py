"""Parameters that enter and leave the user's own optimiser, with the settings they are given there.

The state of all other parameters is never touched. No optimiser is made or stepped here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from esper.leyline.errors import OptimizerError, SettingError, is_number
from esper.leyline.rates import is_low

PER_GROUP_SCHEDULERS = (
    "LambdaLR, MultiplicativeLR, StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR, "
    "PolynomialLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, OneCycleLR"
)
"""Schedulers whose per-group lists can be extended; others are refused by name."""
_WHOLE_OPTIMIZERS = ("LBFGS", "ZeroRedundancyOptimizer")

Originals = Mapping[nn.Parameter, nn.Parameter]
"""Parameter of a copy -> the parameter of the host that it was copied from."""


class Group(NamedTuple):
    """One parameter group: the link to its optimiser, and its number there."""

    link: "OptimizerLink"
    number: int


class OptimizerLink:
    """One optimiser that follows one growing network.

    Every slot has parameter groups there, empty until a seed is planted: one like the host's
    largest, and one like each other group that its module has parameters in, since a copy inherits
    the settings of what it copies. Of several optimisers the first one's link leads those of
    `others`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: nn.Module,
        sources: Mapping[str, nn.Module],
        *,
        scheduler: Any = None,
        seed_lr: float | None = None,
        follows_rates: bool = True,
    ):
        """Add the slots' groups.

        Args:
            optimizer: the user's own.
            host: the network without what has grown.
            sources: the modules that a copy in each slot would copy.
            scheduler: what drives the optimiser's rates, if it was made before this link.
            seed_lr: a live seed's rate as a multiple of the host's; by default that of the save,
                or 1.
            follows_rates: watch every step. Not where rates are tensors on a device, which must
                not be read back inside an epoch.
        """
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.seed_lr = 1.0 if seed_lr is None else float(seed_lr)
        self.is_seed_lr_given = seed_lr is not None
        self.sources = sources
        self.others: tuple[OptimizerLink, ...] = ()
        self.home = _find_home(optimizer, host)
        self.groups: dict[str, dict[int, int]] = {}
        """slot -> {group of the host: the slot's own group like it}"""
        group_of: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            group_of |= dict.fromkeys(map(id, group["params"]), number)
        for slot_id, source in sources.items():
            present = {group_of[id(p)] for p in source.parameters() if id(p) in group_of}
            likes = [self.home, *sorted(present - {self.home})]
            self.groups[slot_id] = {like: self._add_group(like) for like in likes}
        self.group_count = len(optimizer.param_groups)
        """the user's groups and the slots'"""
        home = optimizer.param_groups[self.home]
        self.peak_rate = max(float(home[key]) for key in ("lr", "initial_lr") if key in home)
        self.was_high = False
        """whether a step was taken at a rate that is not low"""
        self.follows_rates = follows_rates
        self.steps = 0
        self.note_gradients: Callable[[], None] = lambda: None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        if follows_rates:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    @property
    def rate(self) -> float:
        """The host's learning rate as its plan has it now."""
        return float(self.optimizer.param_groups[self.home]["lr"])

    @property
    def is_rate_low(self) -> bool:
        """Whether the host's rate is at most a tenth of its peak."""
        return is_low(self.rate, self.peak_rate)

    @property
    def has_rate_fallen(self) -> bool:
        """Whether the rate is low and was not always.

        At the start of a warm-up it is low and has not fallen.
        """
        return self.is_rate_low and self.was_high

    @property
    def all(self) -> tuple["OptimizerLink", ...]:
        """This link and those that it leads."""
        return (self, *self.others)

    def shares_optimizer(self) -> bool:
        """Whether another garden follows this optimiser too."""
        hooks = self.optimizer._optimizer_step_pre_hooks.values()
        followers = [getattr(hook, "__self__", None) for hook in hooks]
        return any(isinstance(f, OptimizerLink) and f not in self.all for f in followers)

    def owners(self) -> dict[int, Group]:
        """The group that each parameter is in, by the parameter's id."""
        owners: dict[int, Group] = {}
        for link in self.all:
            for number, group in enumerate(link.optimizer.param_groups):
                for parameter in group["params"]:
                    owners[id(parameter)] = Group(link, number)
        return owners

    def adopt(
        self,
        slot_id: str,
        parameters: Iterable[nn.Parameter],
        originals: Originals,
        *,
        is_host: bool = False,
    ) -> None:
        """Take in the parameters of a seed that is planted, without history.

        Each joins the slot's group like its original's. With `is_host` they are a fossil's that is
        older than this optimiser, and join the original's group itself.
        """
        owners = self.owners()
        for parameter in parameters:
            if is_host and id(parameter) in owners:
                continue
            like = owners.get(id(originals.get(parameter)))
            if like is None:
                like = self._choose(slot_id, parameter, owners)
            link = like.link
            slot_groups = link.groups[slot_id]
            number = (
                like.number if is_host else slot_groups.get(like.number, slot_groups[link.home])
            )
            group = link.optimizer.param_groups[number]
            group["params"].append(parameter)
            if isinstance(link.optimizer, torch.optim.Adagrad):
                _make_state(link.optimizer, group, parameter)

    def _choose(self, slot_id: str, parameter: nn.Parameter, owners: Mapping[int, Group]) -> Group:
        """The home group of the optimiser that trains a parameter without original.

        It is the one that trains most parameters of its rank in the slot's module, or anywhere.
        """
        if not self.others:
            return Group(self, self.home)
        trained: list[nn.Parameter] = []
        for link in self.all:
            for group in link.optimizer.param_groups:
                # not this seed's own, which are in no group of `owners`
                trained += [p for p in group["params"] if id(p) in owners]
        alike = [p for p in trained if p.dim() == parameter.dim()]
        inside = {id(p) for p in self.sources[slot_id].parameters()}
        alike_inside = [p for p in alike if id(p) in inside]
        # Muon takes matrices only; what trains vectors takes parameters of any rank
        vectors = [p for p in trained if p.dim() == 1]
        for candidates in (alike_inside, alike, vectors):
            sizes = [_count_trained(candidates, owners, link) for link in self.all]
            if any(sizes):
                link = self.all[sizes.index(max(sizes))]
                return Group(link, link.home)
        return Group(self, self.home)

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the parameters of a culled seed leave, and their state."""
        gone = {id(parameter) for parameter in parameters}
        for link in self.all:
            for group in link.optimizer.param_groups:
                group["params"][:] = [p for p in group["params"] if id(p) not in gone]
            leaving = [p for p in link.optimizer.state if id(p) in gone]
            for parameter in leaving:
                del link.optimizer.state[parameter]

    def commit(self, slot_id: str) -> None:
        """Move the parameters of a seed that is host now to the host's groups, state and all."""
        for link in self.all:
            groups = link.optimizer.param_groups
            for like, number in link.groups[slot_id].items():
                moving = groups[number]["params"]
                groups[like]["params"].extend(moving)
                moving.clear()

    def detach(self) -> None:
        """Stop following; the groups stay, since a scheduler may already count on them."""
        for link in self.all:
            for handle in link._handles:
                handle.remove()

    def _add_group(self, like: int) -> int:
        """An empty group with the settings of another; returns its number."""
        groups = self.optimizer.param_groups
        settings = _settings_of(groups[like])
        for group in groups:
            # names given at construction do not stay true while parameters move
            group.pop("param_names", None)
        self.optimizer.add_param_group({"params": [], **settings})
        # the scheduler's plan for the host is the slot's too
        for name in ("base_lrs", "_last_lr", "lr_lambdas"):
            values = getattr(self.scheduler, name, None)
            if isinstance(values, list) and values:
                values.append(values[like])
        return len(self.optimizer.param_groups) - 1

    def _before_step(self, *_: Any) -> None:
        """Give seeds the settings of the host's group, whatever set them, for one step.

        Their multiple of the rate acts on this step alone.
        """
        self.steps += 1
        self.note_gradients()
        self.peak_rate = max(self.peak_rate, self.rate)
        self.was_high |= not self.is_rate_low
        self._follow(self.seed_lr)

    def _after_step(self, *_: Any) -> None:
        self._follow(1.0)

    def _follow(self, multiple: float) -> None:
        """Give the slots' groups the settings of the host's, and `multiple` times their rate."""
        groups = self.optimizer.param_groups
        for numbers in self.groups.values():
            for like, number in numbers.items():
                settings = _settings_of(groups[like])
                groups[number].update(settings, lr=settings["lr"] * multiple)


def _find_home(optimizer: torch.optim.Optimizer, host: nn.Module) -> int:
    """The number of the group with most of the host's parameters.

    What has grown does not count: it would make another group the largest.
    """
    known = {id(parameter) for parameter in host.parameters()}
    sizes = []
    for group in optimizer.param_groups:
        sizes.append(sum(p.numel() for p in group["params"] if id(p) in known))
    return sizes.index(max(sizes))


def _count_trained(
    parameters: Iterable[nn.Parameter], owners: Mapping[int, Group], link: OptimizerLink
) -> int:
    """How many of these numbers one optimiser trains."""
    return sum(p.numel() for p in parameters if owners[id(p)].link is link)


def _make_state(
    optimizer: torch.optim.Adagrad, group: Mapping[str, Any], parameter: nn.Parameter
) -> None:
    """Give a parameter its state; all optimisers but Adagrad make theirs at the first step."""
    options = {
        key: group[key] for key in ("initial_accumulator_value", "foreach", "fused") if key in group
    }
    optimizer.state.update(type(optimizer)([parameter], **options).state)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings, for another one to have."""
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key not in ("params", "name", "param_names"):
            settings[key] = value.clone() if isinstance(value, Tensor) else value
    return settings


def link_optimizers(
    optimizer: Any,
    before: OptimizerLink | None,
    host: nn.Module,
    sources: Mapping[str, nn.Module],
    *,
    scheduler: Any = None,
    seed_lr: float | None = None,
    follows_rates: bool = True,
) -> OptimizerLink:
    """Let one optimiser, or each of several, follow a network in place of `before`.

    A refusal leaves all as it was. `OptimizerLink` explains the options.
    """
    optimizers = _unwrap(optimizer, "optimizer")
    plans = _unwrap(scheduler, "scheduler")
    if seed_lr is not None and (not is_number(seed_lr) or not seed_lr > 0):
        raise SettingError(
            f"seed_lr must be above 0, got {seed_lr!r}; it is a multiple of the host's rate."
        )
    attached = set() if before is None else {id(link.optimizer) for link in before.all}
    if not attached.isdisjoint(map(id, optimizers)):
        raise OptimizerError("this optimiser is already attached; attach(optimizer) once only.")
    _refuse_unfit(optimizers, host)
    _refuse_unfit_schedulers(plans, optimizers)
    plan_of = {id(plan.optimizer): plan for plan in plans}
    links = []
    for followed in optimizers:
        link = OptimizerLink(
            followed,
            host,
            sources,
            scheduler=plan_of.get(id(followed)),
            seed_lr=seed_lr,
            follows_rates=follows_rates,
        )
        links.append(link)
    first, *others = links
    first.others = tuple(others)
    return first


def _unwrap(wrapped: Any, name: str) -> list[Any]:
    """One optimiser or scheduler, several or None as a list, without accelerate's wrappers.

    Hooks of a wrapper would never be called.
    """
    if wrapped is None:
        return []
    listed = list(wrapped) if isinstance(wrapped, list | tuple) else [wrapped]
    for index, outer in enumerate(listed):
        if type(outer).__module__.startswith("accelerate."):
            listed[index] = getattr(outer, name)
    return listed


def _refuse_unfit(optimizers: Sequence[Any], host: nn.Module) -> None:
    """Refuse optimisers that cannot follow, or that do not own the host's parameters once each."""
    unfit = [optimizer for optimizer in optimizers if not _takes_parameters_singly(optimizer)]
    if unfit or not optimizers:
        name = type(unfit[0]).__name__ if unfit else "[]"
        raise OptimizerError(
            f"{name} cannot follow a growing network: parameters enter and leave one by one, and "
            f"the optimiser must treat them so. Use SGD, Adam, AdamW or another param_groups "
            f"optimiser."
        )
    owned: list[int] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned += [id(parameter) for parameter in group["params"]]
    known = set(owned)
    if len(owned) != len(known):
        raise OptimizerError(
            "two of these optimisers own the same parameter; give each one parameters of its own."
        )
    missing = [
        name for name, p in host.named_parameters() if p.requires_grad and id(p) not in known
    ]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise OptimizerError(
            f"what you attach does not own {len(missing)} of the host's trainable parameters "
            f"({shown}). Build it from garden.parameters(), or freeze what it should not train, "
            f"and attach it again."
        )


def _takes_parameters_singly(optimizer: Any) -> bool:
    is_whole = type(optimizer).__name__ in _WHOLE_OPTIMIZERS
    return isinstance(optimizer, torch.optim.Optimizer) and not is_whole


def _refuse_unfit_schedulers(plans: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Refuse schedulers that would not know the slots' parameter groups."""
    planned = {id(plan.optimizer) for plan in plans if hasattr(plan, "optimizer")}
    for optimizer in optimizers:
        is_driven = any("initial_lr" in group for group in optimizer.param_groups)
        if is_driven and id(optimizer) not in planned:
            raise OptimizerError(
                "a scheduler drives this optimiser already and would not know the slots' "
                "parameter groups. Pass it: attach(optimizer, scheduler), or create it after "
                "attach(optimizer)."
            )
    extensible = [getattr(schedulers, name) for name in PER_GROUP_SCHEDULERS.split(", ")]
    for plan in plans:
        if type(plan) not in extensible:
            raise OptimizerError(
                f"scheduler {type(plan).__name__} cannot be extended to a slot's parameter group. "
                f"Use one of {PER_GROUP_SCHEDULERS}, or create the scheduler after "
                f"attach(optimizer) and leave it out of the call."
            )
    if planned - {id(optimizer) for optimizer in optimizers}:
        raise OptimizerError(
            "the scheduler drives another optimiser; attach the two that belong together."
        )
