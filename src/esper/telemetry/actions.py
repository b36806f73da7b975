"""One decision as a record, from raw indices and the tables: written for every host and epoch, so nothing is built."""

from collections.abc import Mapping
from typing import Any

from esper.leyline.factored_actions import DEFAULT_SPACE, ActionSpace, look_up

ACTION_TAKEN = "ACTION_TAKEN"


def emit_last_action(
    *,
    env_id: int,
    epoch: int,
    slot_idx: int,
    blueprint_idx: int,
    blend_idx: int,
    op_idx: int,
    slot_id: str,
    masked: Mapping[str, bool],
    success: bool,
    space: ActionSpace = DEFAULT_SPACE,
) -> dict[str, Any]:
    """The record of one decision, of type ACTION_TAKEN; `masked` says of each head whether its mask left no choice."""
    op, _, blueprint, blend = look_up(space, op_idx, slot_idx, blueprint_idx, blend_idx)
    return {
        "kind": "last_action",
        "env_id": env_id,
        "inner_epoch": epoch,
        "op": op,
        "slot_id": slot_id,
        "blueprint_id": blueprint,
        "blend_id": blend,
        **{f"{head}_masked": bool(masked.get(head, False)) for head in ("op", "slot", "blueprint", "blend")},
        "action_success": success,
    }
