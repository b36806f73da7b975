"""What a round of episodes adds up to, and what is told of it on the way.

Counts and writes; steers nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import OP_NAMES
from esper.simic.environment import GrowthVectorEnv, Info
from esper.simic.team import Team
from esper.telemetry import events
from esper.telemetry.escalation import TelemetryLevel
from esper.telemetry.sink import Sink

Array = NDArray[Any]
_LAST = ("accuracy", "twin_accuracy", "params_share")
"""what is kept of each host's last epoch; parameters are over the host's own"""


class RoundTally:
    """Follows one round through its steps."""

    def __init__(self, env: GrowthVectorEnv, number: int, sink: Sink):
        self.env, self.number, self.sink = env, number, sink
        self.returns = np.zeros(env.num_envs)
        self.parts = dict.fromkeys(env.weights, 0.0)
        self.ops = np.zeros(len(OP_NAMES), int)
        self.stages: dict[str, int] = {}
        self.refused = 0
        self.last = np.zeros((env.num_envs, len(_LAST)))
        self.ranks: list[events.RankTimed] = []
        """how long each process took to play its share:

        this one until the round is finished, then all
        """

    def take(
        self,
        first: int,
        actions: Array,
        rewards: Array,
        masks: Mapping[str, Array],
        info: Info,
        goes_on: Array,
    ) -> None:
        """Take in one step of those hosts, from `first` on, that go on; what an episode has cost is
        told as it ends.
        """
        for row in np.flatnonzero(goes_on).tolist():
            host, told, parts = first + row, info["events"][row], info["reward_parts"][row]
            self.returns[host] += rewards[row]
            for name, value in parts.items():
                self.parts[name] += value
            self.ops[actions[row, 0]] += 1
            success = not any(isinstance(event, events.ActionRefused) for event in told)
            self.refused += not success
            if self.sink.wants(TelemetryLevel.DEBUG):
                self._tell_action(
                    host,
                    actions[row].tolist(),
                    {n: mask[row] for n, mask in masks.items()},
                    success,
                )
            self.emit(host, told, reward=float(rewards[row]), reward_parts=parts)
            if self.env.is_over[host] and self.sink.wants(TelemetryLevel.NORMAL):
                self.sink.write(self.env.episodes.close(host))

    def emit(self, host: int, told: Sequence[events.Event], **earned: Any) -> None:
        """Write a host's events; its epoch gets the twin's reading and what the decision before it
        earned.
        """
        model, twin = self.env.population.runs[host].model, self.env.twin(host)
        self.last[host] = (
            self.env.accuracy[host],
            twin.held_out_accuracy,
            model.total_params / model.host_params,
        )
        for event in told:
            if isinstance(event, events.StageChanged):
                self.stages[event.after] = self.stages.get(event.after, 0) + 1
            if isinstance(event, events.HostEpoch):
                event = replace(
                    event, round=self.number, twin_accuracy=twin.held_out_accuracy, **earned
                )
            self.sink.write(event)

    def _tell_action(
        self, host: int, action: list[int], masks: Mapping[str, Array], success: bool
    ) -> None:
        (op, slot, blueprint, blend), heads = action, self.env.heads
        cases = {"op": (), "slot": (op,), "blueprint": (slot,), "blend": ()}
        used = {head.name for head in heads.heads if op in heads.uses(head)}
        record = events.emit_last_action(
            env_id=self.env.first + host,
            epoch=self.env.population.runs[host].epoch
            - 1,  # decided before the epoch that pays for it
            slot_idx=slot,
            blueprint_idx=blueprint,
            blend_idx=blend,
            op_idx=op,
            slot_id=self.env.space.slots.slot_ids[slot],
            masked={
                head: head not in used or masks[head][*case].sum() <= 1
                for head, case in cases.items()
            },
            success=success,
            space=self.env.space,
        )
        self.sink.write_record(
            events.ACTION_TAKEN, {"round": self.number, **record}, TelemetryLevel.DEBUG
        )

    def finish(
        self, decisions: int, update: dict[str, Any], seconds: float, team: Team
    ) -> events.RoundFinished:
        """The round as one event, of the hosts of all ranks; the slowest rank's clock counts.

        Rank 0 tells it.
        """
        last = dict(zip(_LAST, self.last.sum(0).tolist(), strict=True))
        own = {
            "hosts": self.env.num_envs,
            "returns": float(self.returns.sum()),
            "refused": self.refused,
            **last,
        }
        ops = dict(zip(OP_NAMES, self.ops.tolist(), strict=True))
        everyone = team.gather((own, self.parts, ops, self.stages, seconds, self.ranks))
        *tables, clocks, ranks = zip(*everyone, strict=True)
        whole, parts, ops, stages = map(_added, tables)
        self.ranks = [timed for own_ranks in ranks for timed in own_ranks]
        hosts = whole["hosts"]
        event = events.RoundFinished(
            round=self.number,
            decisions=decisions,
            mean_return=whole["returns"] / hosts,
            **{name: whole[name] / hosts for name in _LAST},
            reward_parts={name: value / hosts for name, value in parts.items()},
            ops=ops,
            **{
                stage.lower(): stages.get(stage, 0)
                for stage in ("GERMINATED", "FOSSILIZED", "CULLED")
            },
            refused=whole["refused"],
            update=update,
            seconds=max(clocks),
        )
        if team.rank == 0:
            self.sink.write(event)
        return event


def _added(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name, in the order in which names first appear."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0) for table in tables) for name in names}
