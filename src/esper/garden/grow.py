"""The doors to a garden: where a model can grow, a model that grows, and one that was saved."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from esper.garden import keeping, processes
from esper.garden.auto_slots import AUTO, Choice, choose_slots
from esper.garden.controls import read_start
from esper.garden.description import describe_garden, describe_growth, describe_host
from esper.garden.garden import Garden
from esper.garden.measuring import direction_of
from esper.kasmina.effects import choose_effective
from esper.kasmina.fitting import Probed, limit_flops, total_budget, usual_blueprints
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pricing import HostFlops
from esper.kasmina.probing import Example, Place, choose_places, find_places, refuse_wrapped
from esper.kasmina.saving import LoadedNetwork, load_network
from esper.kasmina.slot import has_slots, remove_slots
from esper.leyline.errors import HostError, SettingError, UnknownNameError, complain
from esper.leyline.registry import in_order
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from esper.tamiyo.policies import Policy
from esper.tamiyo.policy_names import Chooser, Rule, parse, read_policy
from esper.tamiyo.rules import RULES, HostFacts

_HOSTS: WeakSet[nn.Module] = WeakSet()
"""The hosts of the gardens of this process; a module does not know what it is a part of."""


def inspect(model: nn.Module, example: Example) -> list[Place]:
    """List every module of a model, in the order of execution, with whether a slot fits there.

    Args:
        model: any model; it is run once, and nothing of it changes.
        example: one batch, as the model takes it: a tensor, a tuple of arguments or a dict of
            keywords.

    Returns:
        A `Place` for each module that runs. It has the module's `name` and class, the `kind` and
        `shape` of its output (without the batch), and the `problem` if no slot fits. Print it to
        read it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> for place in esper.inspect(model, torch.zeros(3, 4)):
        ...     print(place.name, place.kind, place.shape, place.problem)
        0 vector (8,) None
        1 vector (8,) None
        2 vector (2,) None
    """
    return find_places(model, example)


@torch.inference_mode(mode=False)  # what is made here is trained later
def grow(
    model: nn.Module,
    *,
    example: Example,
    slots: str | Sequence[str] | None = AUTO,
    blueprints: Sequence[str] | None = None,
    budget: float | int | None = None,
    budget_flops: float | int | None = None,
    max_seeds: int | None = None,
    policy: Chooser = "heuristic",
    higher_is_better: bool | None = None,
    settings: GrowthSettings | None = None,
    verbose: bool = False,
    keep_start: bool = True,
) -> Garden:
    """Wrap a model so that it can grow while you train it.

    Until something is planted, the wrapped model computes what the bare one does, bit for bit.

    Args:
        model: the host, any `nn.Module`. Train `garden.model` instead of it from now on.
        example: one batch, as the model takes it, to learn the shapes from: a tensor, a tuple of
            arguments or a dict of keywords.
        slots: the sub-modules on whose output seeds may grow: a name, a shell pattern or a regular
            expression, or a list of those. `esper.inspect` lists the names. "auto" or None: Esper
            chooses up to four, repeated blocks first, and says which on standard error.
        blueprints: what may be planted, by name. By default all blueprints that fit, except copies
            of the module at the slot ("copy", "copy_zero"), and except attention in sequences of a
            model with a mask or a cache, which seeds do not see.
        budget: most parameters of the grown network. A float is a multiple of the model's own
            (1.5: half as many again), an int a number of parameters.
        budget_flops: most FLOPs of one example forward through the grown network, written like
            `budget`. With both, both hold.
        max_seeds: most seeds, live and kept. Without it and without a budget: one per slot.
        policy: what decides: "never", "schedule", "random", "heuristic" or "sham", each with
            settings if you like ("schedule:epochs=1+5"), "pretrained" or the file of another
            policy that `esper ppo` trained, or a function from `HostFacts` to a policy of your own.
        higher_is_better: whether your `evaluate` returns scores. By default bools count as scores
            and numbers as losses.
        settings: how seeds live: lengths of stages, random seed, late pruning; see
            `GrowthSettings`.
        verbose: whether `step` returns every event: measurements, stages and gates too. By default
            it returns what changed the network, and hints; `garden.history` has all.
        keep_start: whether a copy of the weights is kept in main memory, so that
            `garden.control(like="start")` can return the model as it was.

    Returns:
        A `Garden`. Attach your optimiser to it, train `garden.model`, and call `garden.step` once
        per epoch.

    Raises:
        HostError: a slot does not fit, or the model is wrapped, sharded, growing already or a part
            of one that grows.
        SettingError: a setting is impossible, or leaves no room to grow.
        UnknownNameError: no such module, blueprint or policy.
        SaveError: the file of a policy does not fit or is damaged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch = torch.zeros(3, 4)
        >>> garden = esper.grow(model, slots=["0", "1"], example=batch, budget=2.0)
        >>> torch.equal(garden.model(batch), model(batch))
        True
        >>> garden.model.host_params, garden.model.budget
        (58, 116)
    """
    settings = GrowthSettings() if settings is None else settings
    processes.require_alike(lambda: _check_host(model, settings))
    processes.share([*model.parameters(), *model.buffers()])
    built: list[_Grown] = []

    def build() -> dict[str, Any]:
        nonlocal policy
        policy = read_policy(policy)
        grown = _build(
            model,
            slots,
            example,
            blueprints=blueprints,
            budget=budget,
            budget_flops=budget_flops,
            max_seeds=max_seeds,
            policy=policy,
            settings=settings,
        )
        built.append(grown)
        description = describe_garden(
            grown.model, keeping.name_policy(policy), direction_of(higher_is_better)
        )
        return description | {"policy_digest": keeping.digest_policy(policy)}

    _agree(model, build, built)
    growing, prices, choice = built[0]
    garden = _tend(growing, policy, higher_is_better, prices)
    garden.verbose = verbose
    if keep_start:
        garden.start = read_start(model)
    if choice is not None and processes.is_first():
        complain(str(choice))
    return garden


class _Grown(NamedTuple):
    """A model that can grow, what one example costs in its host, and what Esper chose for it."""

    model: MorphogeneticModel
    prices: HostFlops | None
    choice: Choice | None


def _check_host(model: nn.Module, settings: GrowthSettings) -> dict[str, Any]:
    """Refuse what cannot grow; what it shares with other processes, described."""
    if not isinstance(settings, GrowthSettings):
        raise SettingError(
            f"settings is a {type(settings).__name__}; write "
            f"settings=esper.GrowthSettings(epochs=30)."
        )
    if isinstance(model, MorphogeneticModel):
        raise HostError("this model already grows; use its garden, or grow garden.harvest().")
    refuse_wrapped(model)
    _refuse_part(model)
    return describe_host(model)


def _agree(model: nn.Module, build: Callable[[], dict[str, Any]], built: list[Any]) -> None:
    """Build in every process; where one fails or differs from the others, none has grown."""
    try:
        processes.require_alike(build)
    except Exception:
        if built:
            remove_slots(model)
        raise


def _build(
    model: nn.Module,
    slots: str | Sequence[str] | None,
    example: Example,
    *,
    blueprints: Sequence[str] | None,
    budget: float | int | None,
    budget_flops: float | int | None,
    max_seeds: int | None,
    policy: str | Callable[[HostFacts], Policy],
    settings: GrowthSettings,
) -> _Grown:
    """Put slots on a model; `grow` explains the options."""
    chosen = _choose_blueprints(blueprints)
    probed = find_places(model, example, settings.kinds)
    if slots is None or slots == AUTO:
        choice = choose_slots(model, example, probed)
        places = choose_places(model, probed, choice.names)
    else:
        choice = None
        places = choose_effective(model, example, probed, _as_patterns(slots))
    names = chosen or usual_blueprints(places)
    if isinstance(policy, str):
        names += [name for name in parse(policy).blueprints() if name not in names]
    if max_seeds is None and budget is None and budget_flops is None:
        max_seeds = len(places)
    config = SlotConfig.for_modules(place.name for place in places)
    growing = MorphogeneticModel(
        model,
        config,
        example=Probed(example, probed),
        blueprints=names,
        max_seeds=max_seeds,
        budget=total_budget(budget, model),
        settings=settings,
    )
    sites = {slot_id: growing.site(slot_id) for slot_id in config.slot_ids}
    prices = HostFlops.of_model(model, example, sites)
    if budget_flops is not None:
        host = None if prices is None else prices.whole
        growing.flops_limit = limit_flops(budget_flops, host, growing.ordered_slots, growing.costs)
    return _Grown(growing, prices, choice)


def _as_patterns(slots: str | Sequence[str]) -> list[str]:
    """The names and patterns that the caller gave; none at all is refused."""
    patterns = [slots] if isinstance(slots, str) else list(slots)
    if not patterns:
        raise SettingError(
            'slots is empty; name at least one module, or let Esper choose: slots="auto". '
            "esper.inspect(model, example) lists the places."
        )
    return patterns


def _choose_blueprints(blueprints: str | Sequence[str] | None) -> list[str]:
    """The names that the caller gave, as a list of its own; empty where all that fit are meant."""
    if blueprints is None:
        return []
    names = [blueprints] if isinstance(blueprints, str) else list(in_order(blueprints))
    if not names:
        raise SettingError(
            "blueprints is empty; name at least one, or leave it out for those that usually fit."
        )
    return names


def _tend(
    model: MorphogeneticModel,
    policy: Chooser,
    higher_is_better: bool | None,
    prices: HostFlops | None,
) -> Garden:
    """A garden of this model; if that is refused, the host can be grown again."""
    try:
        garden = Garden(model, policy, higher_is_better, prices)
    except Exception:
        remove_slots(model.host)
        raise
    _HOSTS.add(model.host)
    return garden


def _refuse_part(model: nn.Module) -> None:
    """Refuse a part of a model that grows: a save of the whole could not be loaded."""
    for host in _HOSTS:
        is_part = model is not host and any(module is model for module in host.modules())
        if is_part and has_slots(host):
            raise HostError(
                f"this {type(model).__name__} is a part of a {type(host).__name__} that grows. One "
                f"garden tends a model: grow the {type(host).__name__} with all slots in one call."
            )


@torch.inference_mode(mode=False)  # what is made here is trained later
def load(
    folder: str | Path,
    model: nn.Module,
    *,
    policy: Chooser | None = None,
) -> Garden:
    """Read the garden that `Garden.save` wrote, around a fresh instance of the same model.

    Build the optimiser as before and `attach` it: it gets its state back, and training continues
    bit for bit.

    Args:
        folder: what was passed to `save`.
        model: the host as it was before it grew; its weights are replaced by the saved ones.
        policy: a policy of your own has to be passed again, and so has a file that has moved.
            Another one than the saved one starts without memory. By default the rule or the file
            that was saved; a file that has changed since is refused.

    Raises:
        SaveError: the save is damaged, belongs to another model, or was written by an older
            version.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> garden = esper.grow(model, slots="0", example=torch.zeros(3, 4), policy="never")
        >>> folder = garden.save("saved-garden")
        >>> fresh = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> loaded = esper.load(folder, fresh)
        >>> torch.equal(fresh[0].weight, model[0].weight)
        True
    """

    loaded: list[LoadedNetwork] = []
    chosen: list[str | Callable[[HostFacts], Policy]] = []

    def check(extra: dict[str, Any], rebuilt: MorphogeneticModel) -> None:
        keeping.check(extra)
        name = extra["policy"]
        is_own = extra["policy_digest"] is None and not isinstance(parse(name), Rule)
        if policy is None and is_own:
            raise UnknownNameError("policy", name, RULES, "Pass your own again: policy=...")
        chosen.append(read_policy(name if policy is None else policy))
        digest = keeping.digest_policy(chosen[0])
        keeping.refuse_changed(extra, keeping.name_policy(chosen[0]), digest)

        saved = extra["description"]
        here = describe_garden(rebuilt, extra["policy"], extra["higher_is_better"])
        keeping.refuse_other(saved, here)

    def read() -> dict[str, Any]:
        refuse_wrapped(model)
        _refuse_part(model)
        saved = load_network(Path(folder), model, check)
        loaded.append(saved)
        name = keeping.name_policy(chosen[0])
        rebuilt = saved.network.model
        description = describe_garden(rebuilt, name, saved.extra["higher_is_better"])
        description["policy_digest"] = keeping.digest_policy(chosen[0])
        return description | describe_growth(rebuilt) | {"epoch": saved.extra["epoch"]}

    _agree(model, read, loaded)
    saved = loaded[0]
    extra = saved.extra
    prices = keeping.prices_of(extra)
    garden = _tend(saved.network.model, chosen[0], extra["higher_is_better"], prices)
    keeping.take(garden, saved.network.optimizer, saved.average, extra)
    return garden
