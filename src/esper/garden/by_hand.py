"""What you do to a garden yourself, between two steps: plant, keep and cull."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from esper.episodes import report_action, report_changes
from esper.garden.undoing import whole
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.leyline.errors import OptimizerError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE
from esper.telemetry.events import Event


class PlantingByHand(ABC):
    """The part of a garden that acts at the user's word, in place of a policy."""

    model: MorphogeneticModel
    epoch: int
    by_hand: set[str]

    @whole
    def plant(self, slot: str, blueprint: str, blend: str = "linear") -> list[Event]:
        """Plant a seed by hand, between two steps: it learns from the next epoch on.

        It is yours to decide about: no rule keeps it, so `keep` or `cull` it when its contribution
        was measured. What is undecided at the end, the harvest leaves out.

        Args:
            slot: where, by the name of the module ("layer1") or of the slot ("r0c0"); `summary`
                lists both.
            blueprint: what, by name.
            blend: how it is blended in: "linear", "sigmoid" or "gated".

        Raises:
            IllegalActionError: the slot is not DORMANT, or the seed does not fit or is too large.
        """
        space = self.model.space
        events = self._act_by_hand(
            OP_GERMINATE, slot, space.blueprint_index(blueprint), space.blend_index(blend)
        )
        self.by_hand.add(self._slot_id(slot))
        return events

    @whole
    def keep(self, slot: str) -> list[Event]:
        """Make the seed of this slot, or of this module, a fossil by hand: it is kept for good.

        Raises:
            IllegalActionError: no seed is there, or its contribution was not measured yet.
        """
        return self._act_by_hand(OP_FOSSILIZE, slot)

    @whole
    def cull(self, slot: str) -> list[Event]:
        """Remove the live seed of this slot by hand; the slot is closed for a while.

        Raises:
            IllegalActionError: no seed is there.
        """
        return self._act_by_hand(OP_CULL, slot)

    def _act_by_hand(self, op: int, slot: str, blueprint: int = 0, blend: int = 0) -> list[Event]:
        """Do what the policy could have done in the last step; what is illegal raises.

        After training and before `step`, the op counts as one of the coming step.
        """
        link = self._require_optimizer()
        slot_id = self._slot_id(slot)
        choice = (op, self.model.slot_config.index_for_slot_id(slot_id), blueprint, blend)
        with self._together():
            changes = self.model.act(choice)
            happened = report_action(self.model.space, choice, changes, 0, self.epoch)
            # once an epoch is being trained, the step at its end ticks this slot like all others
            if not link.steps:
                happened += report_changes(0, self.epoch, self.model.tick(slot_id))
        return self._emit(happened)

    def _slot_id(self, name: str) -> str:
        """The id of a slot that the user names by its id or by its module."""
        modules = self.model.slot_config.modules
        if name in modules:
            return name
        for slot_id, module in modules.items():
            if module == name:
                return slot_id
        raise UnknownNameError("slot or module", name, [*modules, *modules.values()])

    def _require_optimizer(self) -> OptimizerLink:
        if self.model.link is None:
            raise OptimizerError(
                "no optimiser is attached, so seeds cannot learn; call attach(optimizer) first."
            )
        return self.model.link

    @abstractmethod
    def _together(self) -> AbstractContextManager[None]:
        """All processes hold the same network before and after."""

    @abstractmethod
    def _emit(self, happened: Sequence[Event]) -> list[Event]:
        """Keep events, and record them."""
