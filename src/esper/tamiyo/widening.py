"""Choices in the action space of a family, whose hosts may have fewer slots."""

from esper.leyline.factored_actions import OP_WAIT, ActionSpace, Choice, look_up
from esper.tamiyo.policies import WAIT


def narrow(choice: Choice, space: ActionSpace, own: ActionSpace) -> Choice | None:
    """Return a choice of a wide space in a host's own space; None where the host lacks the slot."""
    if space == own:
        return choice
    _, slot_id, blueprint_id, blend = look_up(space, *choice)
    if choice[0] == OP_WAIT:
        return WAIT
    if slot_id not in own.slots.slot_ids:
        return None
    return (
        choice[0],
        own.slots.index_for_slot_id(slot_id),
        own.blueprint_index(blueprint_id),
        own.blend_index(blend),
    )
