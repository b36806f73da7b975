"""What a round of episodes adds up to, and the events that are emitted on the way.

It counts and writes; it steers nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import OP_NAMES
from esper.runtime.ledger import Ledger
from esper.simic.costs import EPISODES, LEARNING, book
from esper.simic.environment import GrowthVectorEnv, Info
from esper.simic.imitation import Lesson
from esper.simic.suite_env import SuiteEnv
from esper.simic.team import Team
from esper.telemetry import events
from esper.telemetry.escalation import TelemetryLevel
from esper.telemetry.sink import Sink

Array = NDArray[Any]


@dataclass
class Sums:
    """What hosts of a round add up to; ranks send it to each other."""

    hosts: int
    returns: float
    refused: int
    accuracy: float  # these three after the last epoch of each host
    twin_accuracy: float
    params_share: float  # of the host's own parameters
    reward_parts: dict[str, float]
    ops: dict[str, int]
    stages: dict[str, int]  # how often a slot came to each
    flops: int  # of their episodes


class RoundTally:
    """Follows one round through its steps."""

    def __init__(
        self,
        env: GrowthVectorEnv | SuiteEnv,
        number: int,
        sink: Sink,
        lesson: Lesson | None = None,
    ):
        self.env = env
        self.number = number
        self.sink = sink
        self.lesson = lesson
        self.returns = np.zeros(env.num_envs)
        self.parts: dict[str, float] = {}
        self.ops = np.zeros(len(OP_NAMES), int)
        self.stages: dict[str, int] = {}
        self.refused = 0
        self.flops = 0  # of the episodes that have ended
        # of each host after its last epoch
        self.accuracy = np.zeros(env.num_envs)
        self.twin_accuracy = np.zeros(env.num_envs)
        self.params_share = np.zeros(env.num_envs)
        self.ranks: list[events.RankTimed] = []
        """how long each process took to play its share; only this one until `finish`"""

    def take(
        self,
        first: int,
        actions: Array,
        rewards: Array,
        masks: Mapping[str, Array],
        info: Info,
        is_playing: Array,
    ) -> None:
        """Take in one step of the hosts from `first` on whose episodes have not ended before it.

        What an episode has cost is emitted when it ends.
        """
        for row in np.flatnonzero(is_playing).tolist():
            host = first + row
            happened = info["events"][row]
            parts = info["reward_parts"][row]
            self.returns[host] += rewards[row]
            for name, value in parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value
            self.ops[actions[row, 0]] += 1
            success = not any(isinstance(event, events.ActionRefused) for event in happened)
            self.refused += not success
            if self.sink.wants(TelemetryLevel.DEBUG):
                host_masks = {name: mask[row] for name, mask in masks.items()}
                self._emit_action(host, actions[row].tolist(), host_masks, success)
            self.emit(host, happened, reward=float(rewards[row]), reward_parts=parts)
            env, index = self.env.locate(host)
            if env.is_over[index]:
                self.flops += env.population.runs[index].ledger.flops
                if self.sink.wants(TelemetryLevel.NORMAL):
                    self.sink.write(env.episodes.close(index))

    def emit(self, host: int, happened: Sequence[events.Event], **earned: Any) -> None:
        """Write a host's events.

        Its epoch gets the twin's reading and what the decision before it earned.
        """
        env, index = self.env.locate(host)
        model = env.population.runs[index].model
        twin = env.twin(index)
        self.accuracy[host] = env.accuracy[index]
        self.twin_accuracy[host] = twin.held_out_accuracy
        self.params_share[host] = model.total_params / model.host_params
        for event in happened:
            if isinstance(event, events.StageChanged):
                self.stages[event.after] = self.stages.get(event.after, 0) + 1
            if isinstance(event, events.HostEpoch):
                event = replace(
                    event, round=self.number, twin_accuracy=twin.held_out_accuracy, **earned
                )
            self.sink.write(event)

    def _emit_action(
        self, host: int, action: list[int], masks: Mapping[str, Array], success: bool
    ) -> None:
        """Write a decision, with the heads that had no choice in it."""
        op, slot, blueprint, blend = action
        env, index = self.env.locate(host)
        heads = self.env.heads
        mask_rows = {
            "op": masks["op"],
            "slot": masks["slot"][op],
            "blueprint": masks["blueprint"][slot],
            "blend": masks["blend"],
        }
        used = {head.name for head in heads.heads if op in heads.uses(head)}
        masked = {head: head not in used or row.sum() <= 1 for head, row in mask_rows.items()}
        record = events.emit_last_action(
            env_id=self.env.first + host,
            # a decision is made before the epoch that pays for it
            epoch=env.population.runs[index].epoch - 1,
            slot_idx=slot,
            blueprint_idx=blueprint,
            blend_idx=blend,
            op_idx=op,
            slot_id=env.space.slots.slot_ids[slot],
            masked=masked,
            success=success,
            space=env.space,
        )
        self.sink.write_record(
            events.ACTION_TAKEN, {"round": self.number, **record}, TelemetryLevel.DEBUG
        )

    def finish(
        self, decisions: int, update: dict[str, Any], learning: Ledger, seconds: float, team: Team
    ) -> events.RoundFinished:
        """The round as one event, of the hosts of all ranks; rank 0 writes it.

        `learning` is what the update has cost. The slowest rank's clock counts.
        """
        everyone = team.gather((self._sums(), seconds, self.ranks))
        sums = _added([rank_sums for rank_sums, _, _ in everyone])
        clocks = [rank_seconds for _, rank_seconds, _ in everyone]
        self.ranks = [timed for _, _, rank_times in everyone for timed in rank_times]
        agreement = None if self.lesson is None else self.lesson.agreement(team)
        event = events.RoundFinished(
            round=self.number,
            decisions=decisions,
            mean_return=sums.returns / sums.hosts,
            accuracy=sums.accuracy / sums.hosts,
            twin_accuracy=sums.twin_accuracy / sums.hosts,
            params_share=sums.params_share / sums.hosts,
            reward_parts={name: part / sums.hosts for name, part in sums.reward_parts.items()},
            ops=sums.ops,
            germinated=sums.stages.get("GERMINATED", 0),
            fossilized=sums.stages.get("FOSSILIZED", 0),
            culled=sums.stages.get("CULLED", 0),
            refused=sums.refused,
            update=update,
            seconds=max(clocks),
            flops={EPISODES: sums.flops, LEARNING: learning.flops},
            agreement=None if agreement is None else agreement.all,
            agreement_on_acts=None if agreement is None else agreement.acts,
        )
        if team.rank == 0:
            self.sink.write(book(LEARNING, self.number, learning))
            self.sink.write(event)
        return event

    def _sums(self) -> Sums:
        """The hosts of this process added up, one after the other."""
        after_last = np.stack([self.accuracy, self.twin_accuracy, self.params_share], 1)
        accuracy, twin_accuracy, params_share = after_last.sum(0).tolist()
        return Sums(
            hosts=self.env.num_envs,
            returns=float(self.returns.sum()),
            refused=self.refused,
            accuracy=accuracy,
            twin_accuracy=twin_accuracy,
            params_share=params_share,
            reward_parts=self.parts,
            ops=dict(zip(OP_NAMES, self.ops.tolist(), strict=True)),
            stages=self.stages,
            flops=self.flops,
        )


def _added(ranks: Sequence[Sums]) -> Sums:
    """The sums of all ranks."""
    return Sums(
        hosts=sum(rank.hosts for rank in ranks),
        returns=sum(rank.returns for rank in ranks),
        refused=sum(rank.refused for rank in ranks),
        accuracy=sum(rank.accuracy for rank in ranks),
        twin_accuracy=sum(rank.twin_accuracy for rank in ranks),
        params_share=sum(rank.params_share for rank in ranks),
        reward_parts=_added_by_name([rank.reward_parts for rank in ranks]),
        ops=_added_by_name([rank.ops for rank in ranks]),
        stages=_added_by_name([rank.stages for rank in ranks]),
        flops=sum(rank.flops for rank in ranks),
    )


def _added_by_name(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name, in the order in which names first appear."""
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(table)
    return {name: sum(table.get(name, 0) for table in tables) for name in names}
