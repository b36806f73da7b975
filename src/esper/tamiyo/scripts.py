"""What happened in an arm as a script of ops, which `Sham` plays without the capacity."""

from collections.abc import Sequence
from typing import NamedTuple

from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, ActionSpace
from esper.telemetry.events import ActionTaken, Event, SeedMeasured, StageChanged


class ScriptedOp(NamedTuple):
    """One op of a script for `Sham`: the decision at which it is due, the op, the slot."""

    decision: int
    op: int
    slot: int


_SCRIPTED_OPS = {
    "GERMINATE": OP_GERMINATE,
    "GERMINATED": OP_GERMINATE,
    "FOSSILIZED": OP_FOSSILIZE,
    "CULLED": OP_CULL,
}
"""Ops and stages that a script repeats, by their names in events."""


def script_of(events: Sequence[Event], space: ActionSpace) -> list[ScriptedOp]:
    """The ops that happened in an arm as a script for `Sham`.

    The ends of seeds that ended by themselves are in it.
    """
    script: dict[ScriptedOp, None] = {}  # each once, in order
    for event in events:
        if not isinstance(event, StageChanged | ActionTaken):
            continue
        op = _SCRIPTED_OPS.get(event.after if isinstance(event, StageChanged) else event.op)
        if op is not None:
            slot = space.slots.index_for_slot_id(event.slot)
            # the first decision, number 0, comes after epoch 1
            script[ScriptedOp(event.epoch - 1, op, slot)] = None
    return sorted(script, key=lambda entry: (entry.decision, entry.op == OP_GERMINATE))


def has_waited(events: Sequence[Event]) -> bool:
    """Whether an arm left a measured seed on probation, as no rule with its standing order does."""
    ended: set[tuple[int, str]] = set()
    for event in events:
        if isinstance(event, StageChanged) and event.before == "PROBATIONARY":
            ended.add((event.epoch, event.slot))
    for event in events:
        if not isinstance(event, SeedMeasured) or event.contribution is None:
            continue
        if event.stage == "PROBATIONARY" and (event.epoch, event.slot) not in ended:
            return True
    return False
