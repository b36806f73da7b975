"""Hosts of several families side by side, each family an environment with its share of the hosts.

All of them show observations and masks of one width, whatever slots and blueprints they have.
Families may have episodes of different lengths, so there is no common step: a trainer plays each
part by itself.
"""

from collections.abc import Callable, Iterable, Sequence

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.slots import SlotConfig
from esper.runtime.ledger import add_up
from esper.simic.environment import GrowthVectorEnv
from esper.simic.twins import Twin
from esper.tamiyo.layout import ObservationLayout


def union_space(spaces: Sequence[ActionSpace]) -> ActionSpace:
    """Return one space with every slot and blueprint that some of these have.

    One space alone stays as it is, with the modules that its slots sit on. Other blends are
    refused: a policy chooses among them by their place.
    """
    first = spaces[0]
    if all(space == first for space in spaces):
        return first
    for space in spaces:
        if space.blends != first.blends:
            raise SettingError(
                f"families of one suite have the blends {', '.join(first.blends)} and "
                f"{', '.join(space.blends)}. Give all of them the same: task.blends."
            )
    slot_ids: dict[str, None] = {}
    blueprints: dict[str, None] = {}
    for space in spaces:
        slot_ids |= dict.fromkeys(space.slots.slot_ids)
        blueprints |= dict.fromkeys(name for name in space.blueprint_ids if name is not None)
    return ActionSpace.of(SlotConfig(tuple(slot_ids)), tuple(blueprints), first.blends)


def widest_layout(spaces: Sequence[ActionSpace]) -> ObservationLayout:
    """Return the layout of observations that has room for a host of each of these spaces."""
    sizes = [space.sizes for space in spaces]
    return ObservationLayout(
        num_slots=max(slots for _, slots, _, _ in sizes),
        num_blueprints=max(blueprints for _, _, blueprints, _ in sizes),
    )


class SuiteEnv:
    """What a trainer plays of a suite: an environment of each family that has hosts here.

    Args:
        families: these environments, in the order of their hosts.
        first: number of the first host here among those of all processes.
        epochs: those of the longest episode of any family of the suite.
        twins: of all families of the suite, here or elsewhere.
        space: what all families together may do.
    """

    def __init__(
        self,
        families: Sequence[GrowthVectorEnv],
        first: int,
        epochs: int,
        twins: Sequence[Twin],
        space: ActionSpace,
    ):
        self.families = list(families)
        self.first = first
        self.epochs = epochs
        self.twin_count = len(twins)
        self.twin_ledger = add_up(twin.ledger for twin in twins)
        self.num_envs = sum(env.num_envs for env in families)
        shown = families[0]
        self.space = space
        self.layout = shown.layout
        self.heads = shown.heads
        self.width = shown.width
        self.single_observation_space = shown.single_observation_space
        self.single_action_space = shown.single_action_space

    @property
    def task_names(self) -> list[str]:
        """The task of each host."""
        return [name for env in self.families for name in env.task_names]

    @property
    def corpus(self) -> str | None:
        """What the data of the families rest on, where that differs between machines."""
        return join_corpora(env.corpus for env in self.families)

    def describe(self, report: Callable[[str], None]) -> None:
        """Report what episodes may cost and rest on, where settings do not say so."""
        for env in self.families:
            report(f"{env.task.name}: {env.num_envs} hosts")
            env.describe(report)

    def locate(self, host: int) -> tuple[GrowthVectorEnv, int]:
        """Where a host of a round is: its environment, and its row there."""
        for env in self.families:
            if host < env.num_envs:
                return env, host
            host -= env.num_envs
        raise IndexError(f"there are {self.num_envs} hosts here")

    def parts(self) -> list[GrowthVectorEnv]:
        """Environments to step in turn: each family's own."""
        return [part for env in self.families for part in env.parts()]

    def settle(self) -> None:
        """Wait for hosts that still train, where a round stops in the middle."""
        for env in self.families:
            env.settle()

    def begin_from(self, seed: int) -> None:
        """Let this seed decide which hosts come next."""
        for env in self.families:
            env.seed = seed


def join_corpora(corpora: Iterable[str | None]) -> str | None:
    """One text for what several data sets rest on; None where none differs between machines."""
    return "; ".join(corpus for corpus in corpora if corpus is not None) or None
