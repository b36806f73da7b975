"""The learner: it acts with a recurrent policy and improves it by PPO on rollouts.

It knows heads, masks and rewards only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.randomness import mix_seed
from esper.leyline.errors import SaveError, SettingError, outline
from esper.simic.ppo.codecs import ActionCodec, Codecs, Mask, ObservationCodec, Spaces
from esper.simic.ppo.diagnostics import MinibatchTrace, UpdateFacts, UpdateRecord, summarise
from esper.simic.ppo.families import FamilyReturns
from esper.simic.ppo.losses import (
    HeadSteps,
    StepTable,
    counts_by_row,
    imitation_loss,
    mean_entropy,
    policy_loss,
    relevant_steps,
    value_loss,
)
from esper.simic.ppo.rollout import (
    Rollout,
    Rows,
    Targets,
    explained_variance,
)
from esper.simic.ppo.settings import PPOConfig, PPOSettings
from esper.simic.team import Team
from esper.storage.files import require_replaceable, write_durably
from esper.storage.store import fitting
from esper.tamiyo.distributions import at_least_single
from esper.tamiyo.heads import openings
from esper.tamiyo.network import ActorCritic, RecurrentActorCritic
from esper.tamiyo.policy_files import (
    FORMAT,
    NETWORK,
    POLICY_FILE,
    Layout,
    PolicyFile,
    load_network,
    read,
    require_tensors,
    seal,
    take,
    weights_of,
)
from esper.tamiyo.recurrence import Hidden

KL_SLACK = 1.5
"""an update stops at this multiple of the target divergence"""


class Judgement(NamedTuple):
    """What the network says now of some rows."""

    log_probs: Tensor  # [heads, R, T]
    values: Tensor  # [R, T]
    entropy: Tensor  # [heads, R, T]


class Descent(NamedTuple):
    """What became of one step of the optimiser."""

    gradient_norm: Tensor | None  # None: not taken, the divergence was too large
    kl: Tensor  # of all ranks


class Passes(NamedTuple):
    """What the passes over one rollout left behind."""

    traces: list[MinibatchTrace]
    early_stop_epoch: int | None  # the pass that the divergence cut short


class PPOAgent:
    """A policy network, its optimiser and its random numbers.

    `esper.learn` and `esper.train_ppo` return one.

    Args:
        network: the policy.
        config: how it learns.
        seed: decides what it draws and how it shuffles.
        codecs: how it reads observations and writes actions; only `act` and `save` need them.
        team: the processes that learn together.
        families: names of the families of hosts that rows of a rollout may be of. Rewards of each
            are divided by the deviation of its returns; without names they stay as they are.

    >>> import esper, gymnasium
    >>> env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    >>> config = esper.PPOConfig(horizon=16, epochs=1, hidden_dim=8, head_dim=8)
    >>> agent = esper.learn(env, 32, config)
    >>> agent.save("agent.safetensors")
    >>> agent = esper.PPOAgent.load("agent.safetensors")
    >>> agent.updates
    1
    >>> obs, info = env.reset(seed=0)
    >>> actions, state = agent.act(obs)
    >>> obs, rewards, terminated, truncated, info = env.step(actions)
    >>> state = agent.restart(state, terminated | truncated)
    >>> actions, state = agent.act(obs, state=state)
    """

    def __init__(
        self,
        network: ActorCritic,
        config: PPOSettings | None = None,
        *,
        seed: int = 0,
        codecs: tuple[ObservationCodec, ActionCodec] | None = None,
        team: Team | None = None,
        families: Sequence[str] = (),
    ):
        self.network = network
        self.config = config or PPOSettings()
        self.codecs = codecs
        self.team = team or Team()
        self.device = next(network.parameters()).device
        self.optimizer = torch.optim.Adam(
            network.parameters(), self.config.lr, eps=1e-5, fused=True
        )
        self.draws = torch.Generator(self.device).manual_seed(mix_seed(seed, 1))
        self.shuffles = torch.Generator().manual_seed(mix_seed(seed, 2))
        self.returns = FamilyReturns(families)
        self.decisions = 0
        self.updates = 0
        self.layout: Layout | None = None  # of a growth policy: what it fits
        self.facts: dict[str, Any] = {}  # of a growth policy: the episodes that it has learned from
        self._evaluate: Callable[..., Any] = network.evaluate_actions
        if self.config.compile is not None:
            self._evaluate = torch.compile(network.evaluate_actions, backend=self.config.compile)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file with all that the agent acts with and learns on from.

        What stands there and is no policy file is refused.
        """
        layout: Layout | Spaces
        if self.layout is not None:
            layout = self.layout
        elif self.codecs is not None and isinstance(self.network, RecurrentActorCritic):
            layout = Spaces.of(*self.codecs, self.network)
        else:
            raise SaveError(
                f"cannot write {path}: this agent knows no spaces; pass codecs=..., as for act."
            )
        require_replaceable(Path(path), POLICY_FILE)
        write_durably(Path(path), self.to_bytes(layout, self.facts))

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> "PPOAgent":
        """Return the agent in a file of `save`, or in a checkpoint of `esper ppo`.

        It is built as the file says; nothing is unpickled.
        """
        path = Path(path)
        content = read(path, Layout | Spaces)
        learner = content.plain.get("learner")
        if learner is None:
            raise SaveError(f"{path} does not say how its learner is built. Use it as --policy.")
        layout: Layout | Spaces = content.plain["layout"]
        network: ActorCritic = load_network(layout.build, content.tensors, path)
        codecs = _plain_codecs(network)
        with fitting(path):
            if isinstance(layout, Spaces):
                codecs = layout.codecs()
            settings = PPOConfig if "horizon" in learner["config"] else PPOSettings
            config = settings.of(learner["config"], str(path))
            families = [*learner["returns"]]
            agent = PPOAgent(network.to(device), config, codecs=codecs, families=families)
        agent.layout = layout if isinstance(layout, Layout) else None
        fresh_draws = agent.draws.get_state()
        if "draws" in content.tensors and len(content.tensors["draws"]) != len(fresh_draws):
            # it was saved on another kind of device, whose draws cannot be continued here
            content.tensors["draws"] = fresh_draws
        agent.facts = agent.restore(content, path)
        return agent

    def to_bytes(self, layout: Layout | Spaces, facts: Mapping[str, Any]) -> bytes:
        """Return the content of a file that `load` reads; `facts` is plain data of the caller."""
        tensors = self._needed_tensors()
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
        plain = {
            "format": FORMAT,
            "layout": asdict(layout),
            "learner": {
                "config": self.config.model_dump(mode="json"),
                "returns": self.returns.state(),
            },
            "counters": {"decisions": self.decisions, "updates": self.updates},
            "facts": dict(facts),
        }
        return seal(tensors, plain)

    def restore(self, content: PolicyFile, path: Path) -> dict[str, Any]:
        """Put the agent back to where it was in a file; returns the facts of the file.

        What does not fit is refused before anything changes.
        """
        require_tensors(
            content.tensors,
            self._needed_tensors(),
            path,
            f"A run continues on the kind of device it was started on, not on "
            f"{self.device.type}: set policy_device.",
        )
        with fitting(path):
            self.network.load_state_dict(take(content.tensors, NETWORK))
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in take(content.tensors, "optimizer.").items():
                index, key = name.split(".", 1)
                state.setdefault(int(index), {})[key] = value
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
            self.draws.set_state(content.tensors["draws"])
            self.shuffles.set_state(content.tensors["shuffles"])
            self.returns.load(content.plain["learner"]["returns"])
            self.decisions = content.plain["counters"]["decisions"]
            self.updates = content.plain["counters"]["updates"]
        return dict(content.plain["facts"])

    def _needed_tensors(self) -> dict[str, Tensor]:
        """What no file lacks: every weight and both states of random numbers."""
        tensors = weights_of(self.network)
        tensors["draws"] = self.draws.get_state()
        tensors["shuffles"] = self.shuffles.get_state()
        return tensors

    def act(
        self, obs: Any, mask: Mask = None, state: Hidden | None = None, deterministic: bool = True
    ) -> tuple[Any, Hidden]:
        """Actions for N environments as their space wants them, and the state to hand back.

        A state of None is where all episodes begin; `restart` clears single ones.
        """
        if self.codecs is None:
            raise SettingError(
                "this agent knows no spaces; pass codecs=(ObservationCodec(space), "
                "ActionCodec(space))."
            )
        observations, actions = self.codecs
        states = observations.encode(obs).to(self.device)
        masks = actions.split_mask(mask, len(states), self.device)
        if state is not None:
            self._require_state(state, len(states))
        with torch.no_grad():
            choices, _, _, hidden = self.network.get_action(
                states, state, masks, deterministic, self.draws
            )
        return actions.decode(choices), hidden

    def _require_state(self, state: Any, count: int) -> None:
        """Refuse what `act` did not return for as many environments."""
        fresh = self.network.get_initial_hidden(count)
        is_pair = isinstance(state, tuple | list) and len(state) == len(fresh)
        parts = state if is_pair else ()
        if [getattr(part, "shape", None) for part in parts] != [part.shape for part in fresh]:
            raise SettingError(
                f"state is {outline(state)}; pass what act returned for {count} environments, or "
                f"None where all episodes begin."
            )

    @staticmethod
    def restart(state: Hidden, begins: Any) -> Hidden:
        """The state with fresh memory in the environments whose episode begins.

        The old memory may hold anything, NaN too.
        """
        try:
            flags = torch.as_tensor(begins, device=state[0].device)
        except (TypeError, ValueError, RuntimeError):  # nothing that is a row of flags
            flags = torch.empty(0)
        if flags.shape != state[0].shape[1:2] or flags.is_floating_point():
            raise SettingError(
                f"begins is {outline(begins)}; give one bool for each of {state[0].shape[1]} "
                f"environments."
            )
        is_new = flags.bool()[None, :, None]
        return state[0].masked_fill(is_new, 0.0), state[1].masked_fill(is_new, 0.0)

    def update(self, rollout: Rollout, imitates: bool = False) -> UpdateRecord:
        """Learn in several passes over fixed advantages; returns what the update did.

        Afterwards the statistics take in the rollout, once.

        Args:
            rollout: what happened.
            imitates: whether its choices are those of a teacher. The policy then learns to make
                them, whatever they earned, and its value learns the returns.
        """
        config = self.config
        pool = self.team.sum
        fresh = self.returns.begin(rollout, config.gamma, pool)
        scales = self.returns.scales(rollout)
        raw, returns = rollout.targets(config.gamma, config.gae_lambda, scales)
        known_share = explained_variance(rollout.values, returns, rollout.valid, pool)
        advantages = self.returns.normalise(raw, rollout, pool)
        entropy_weight: float | None = config.annealed("entropy", self.decisions)
        lr = config.annealed("lr", self.decisions)
        self.optimizer.param_groups[0]["lr"] = lr
        table = self._look_through(rollout)
        if imitates:
            entropy_weight = None
            self._judge_teacher(rollout)
        passes = self._passes(rollout, table, Targets(advantages, returns), entropy_weight)
        stale = self._stale_state_error(rollout)
        self.network.observation_stats.update(_finite(rollout.states[rollout.valid]), pool)
        self.network.update_return_stats(_finite(returns[rollout.valid][:, None]), pool)
        self.returns.update(rollout, config.gamma, pool, fresh)
        *head_decisions, decisions = table.decisions.tolist()
        self.decisions += decisions
        self.updates += 1
        facts = UpdateFacts(
            decisions=self.decisions,
            head_decisions=head_decisions,
            explained_variance=known_share,
            early_stop_epoch=passes.early_stop_epoch,
            stale_state_error=stale,
            lr=lr,
            entropy_weight=entropy_weight or 0.0,
        )
        return summarise(passes.traces, self.network.spec.names, config.clip, facts, self.team)

    def _look_through(self, rollout: Rollout) -> StepTable:
        """What the decisions of all pieces were like, with the counts of all processes."""
        here = rollout.count * rollout.per_row
        rows = rollout.rows(torch.arange(here, device=self.device))
        is_relevant = relevant_steps(self.network.spec, rows.choices, rows.valid)
        is_open = openings(self.network.spec, rows.masks, rows.valid)
        counts_here = counts_by_row(is_relevant, rows.valid, is_open)
        counts = counts_here.new_zeros(len(counts_here), rollout.total * rollout.per_row)
        first = rollout.first * rollout.per_row
        counts[:, first : first + here] = counts_here
        return StepTable(is_relevant, is_open, counts=self.team.sum(counts))

    @torch.no_grad()
    def _judge_teacher(self, rollout: Rollout) -> None:
        """Store how likely the choices of a teacher are before the policy learns them."""
        assert rollout.per_row == 1, "a teacher's rows are whole"
        rows = rollout.rows(torch.arange(rollout.count, device=self.device))
        rollout.log_probs[:] = self._judge(rows).log_probs.permute(2, 1, 0)

    def _passes(
        self, rollout: Rollout, table: StepTable, targets: Targets, entropy_weight: float | None
    ) -> Passes:
        """Take a step for every minibatch of every pass, up to one that goes too far.

        Without `entropy_weight` the choices are a teacher's.
        """
        traces: list[MinibatchTrace] = []
        here = rollout.count * rollout.per_row
        for epoch in range(self.config.epochs):
            for part in self._assign(rollout.total * rollout.per_row):
                index = part - rollout.first * rollout.per_row
                # of each minibatch, what this process has
                index = index[(index >= 0) & (index < here)]
                steps = table.minibatch(index, part)
                minibatch_targets = Targets(
                    advantages=rollout.cut(targets.advantages, index),
                    returns=rollout.cut(targets.returns, index),
                )
                trace = self._step(rollout, index, steps, minibatch_targets, entropy_weight)
                traces.append(trace)
                if trace.gradient_norm is None:
                    return Passes(traces, early_stop_epoch=epoch)
        return Passes(traces, early_stop_epoch=None)

    def _assign(self, total: int) -> list[Tensor]:
        """All processes' pieces in a fresh order, in `minibatches` parts."""
        order = torch.randperm(total, generator=self.shuffles).to(self.device)
        return list(order.tensor_split(min(self.config.minibatches, total)))

    def _step(
        self,
        rollout: Rollout,
        index: Tensor,
        steps: HeadSteps,
        targets: Targets,
        entropy_weight: float | None,
    ) -> MinibatchTrace:
        """One minibatch: judge, lose, descend."""
        config = self.config
        rows = rollout.rows(index)
        judged = self._judge(rows)
        old = rows.log_probs.movedim(-1, 0)
        if entropy_weight is None:
            policy = imitation_loss(judged.log_probs, old, steps)
        else:
            policy = policy_loss(
                judged.log_probs,
                old,
                targets.advantages,
                steps,
                rows.valid,
                config.clip,
                config.clip_mode,
            )
        value = value_loss(
            judged.values,
            rows.values,
            targets.returns,
            rows.valid,
            config.value_clip,
            scale=self.network.return_stats.std.to(judged.values.dtype),
            count=steps.valid,
        )
        entropies = mean_entropy(judged.entropy, steps, rows.valid)
        loss = policy.total + config.value_weight * value
        if entropy_weight is not None:
            loss = loss - entropy_weight * entropies.sum()
        descent = self._descend(loss, policy.kl)
        return MinibatchTrace(
            rows=rollout.first + index // rollout.per_row,
            begins=rollout.begins(index),
            log_ratios=policy.log_ratios,
            is_relevant=steps.is_relevant,
            valid=rows.valid,
            head_losses=policy.per_head.detach(),
            entropies=entropies.detach(),
            value_loss=value.detach(),
            kl=descent.kl,
            gradient_norm=descent.gradient_norm,
        )

    def _judge(self, rows: Rows) -> Judgement:
        """What the network says now of decisions that were stored; no rows have no judgement."""
        names = self.network.spec.names
        if not len(rows.states):
            nothing = rows.values.new_zeros(len(names), *rows.valid.shape)
            return Judgement(log_probs=nothing, values=rows.values, entropy=nothing)
        evaluation = self._evaluate(
            rows.states, rows.choices, rows.masks, rows.hidden, rows.starts, needs_state=False
        )
        return Judgement(
            log_probs=torch.stack([evaluation.log_probs[name] for name in names]),
            values=evaluation.values,
            entropy=torch.stack([evaluation.entropy[name] for name in names]),
        )

    def _descend(self, loss: Tensor, kl: Tensor) -> Descent:
        """One step, unless gradients are not finite or the policy went too far."""
        self.optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:
            loss.backward()
        kl = self.team.sum_gradients(self.network.parameters(), kl)
        if self.config.target_kl is not None and bool(kl > KL_SLACK * self.config.target_kl):
            return Descent(gradient_norm=None, kl=kl)
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_grad_norm)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        return Descent(gradient_norm=at_least_single(norm), kl=kl)

    @torch.no_grad()
    def _stale_state_error(self, rollout: Rollout) -> float:
        """How far stored states are from those that the network computes now.

        It is the mean squared difference at the ends of pieces where episodes continue, or 0.
        """
        last_steps = [*range(rollout.piece - 1, rollout.steps - 1, rollout.piece)]
        last_steps.append(rollout.steps - 1)
        continues = (rollout.valid & ~rollout.ended)[last_steps]
        if not bool(continues.any()):
            return 0.0
        pieces = rollout.per_row
        memory, cell = rollout.hidden
        # the state after a piece is stored as the state before the next one
        stored_after = [memory[:, number::pieces] for number in range(1, pieces)]
        stored_after.append(rollout.end_hidden[0])
        fresh = (memory[:, ::pieces].contiguous(), cell[:, ::pieces].contiguous())
        gaps = []
        for last, is_continued, stored in zip(last_steps, continues, stored_after, strict=True):
            steps = slice(last // rollout.piece * rollout.piece, last + 1)
            states = rollout.states[steps].transpose(0, 1)
            fresh = self.network.follow(states, fresh, rollout.starts[steps].T)
            gaps.append((fresh[0] - stored)[:, is_continued])
        return float(torch.cat(gaps, 1).square().mean())


def _finite(rows: Tensor) -> Tensor:
    """The rows that statistics may take in: one NaN would stay in them for ever."""
    return rows[rows.isfinite().all(1)]


def _plain_codecs(network: ActorCritic) -> Codecs:
    """Codecs for numbers as the network reads and writes them."""
    observation_space = gym.spaces.Box(-np.inf, np.inf, (network.state_dim,))
    action_space = gym.spaces.MultiDiscrete([*network.spec.sizes])
    return Codecs(ObservationCodec(observation_space), ActionCodec(action_space, network.spec))
