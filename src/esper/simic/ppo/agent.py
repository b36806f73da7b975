"""The learner: it acts with a recurrent policy and improves it by PPO on rollouts.

It knows heads, masks and rewards only.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.randomness import mix_seed
from esper.leyline.errors import SaveError, SettingError
from esper.simic.ppo.codecs import ActionCodec, Codecs, Mask, ObservationCodec, Spaces
from esper.simic.ppo.diagnostics import MinibatchTrace, UpdateRecord, summarise
from esper.simic.ppo.losses import (
    HeadSteps,
    counts_by_row,
    mean_entropy,
    policy_loss,
    relevant_steps,
    value_loss,
)
from esper.simic.ppo.rollout import Rollout, Rows, explained_variance, normalise_advantages
from esper.simic.ppo.settings import PPOConfig, PPOSettings
from esper.simic.team import Team
from esper.storage.files import write_durably
from esper.storage.store import fitting
from esper.tamiyo.distributions import at_least_single
from esper.tamiyo.heads import openings
from esper.tamiyo.network import Hidden, RecurrentActorCritic
from esper.tamiyo.policy_files import (
    FORMAT,
    NETWORK,
    Layout,
    PolicyFile,
    load_network,
    read,
    require_tensors,
    seal,
    take,
    weights_of,
)

KL_SLACK = 1.5  # An update stops at this multiple of the target divergence.


class PPOAgent:
    """A policy network, its optimiser and its random numbers; only `act`, in foreign environments,
    needs `codecs`.
    """

    def __init__(
        self,
        network: RecurrentActorCritic,
        config: PPOSettings | None = None,
        *,
        seed: int = 0,
        codecs: tuple[ObservationCodec, ActionCodec] | None = None,
        team: Team | None = None,
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
        self.decisions = 0
        self.updates = 0
        self.layout: Layout | None = None  # of a growth policy: what it fits
        self.facts: dict[str, Any] = {}  # of a growth policy: the episodes that it has learned from
        self._evaluate: Callable[..., Any] = network.evaluate
        if self.config.compile is not None:
            self._evaluate = torch.compile(network.evaluate, backend=self.config.compile)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file with all that the agent acts with and learns on from."""
        layout: Layout | Spaces
        if self.layout is not None:
            layout = self.layout
        elif self.codecs is not None:
            layout = Spaces.of(*self.codecs, self.network)
        else:
            raise SaveError(
                f"cannot write {path}: this agent knows no spaces; pass codecs=..., as for act."
            )
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
        network: RecurrentActorCritic = load_network(layout.build, content.tensors, path)
        codecs = _plain_codecs(network)
        with fitting(path):
            if isinstance(layout, Spaces):
                codecs = layout.codecs()
            settings = PPOConfig if "horizon" in learner["config"] else PPOSettings
            config = settings.of(learner["config"], str(path))
            agent = PPOAgent(network.to(device), config, codecs=codecs)
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
            "learner": {"config": self.config.model_dump(mode="json")},
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
        with torch.no_grad():
            choices, _, _, hidden = self.network.choose(
                states, state, masks, deterministic, self.draws
            )
        return actions.decode(choices), hidden

    @staticmethod
    def restart(state: Hidden, begins: Any) -> Hidden:
        """The state with fresh memory in the environments whose episode begins, whatever the old
        memory holds.
        """
        is_new = torch.as_tensor(begins, device=state[0].device)[None, :, None]
        return state[0].masked_fill(is_new, 0.0), state[1].masked_fill(is_new, 0.0)

    def update(self, rollout: Rollout) -> UpdateRecord:
        """Several passes over fixed advantages; then the statistics take in the rollout, once."""
        config, pool = self.config, self.team.sum
        raw, returns = rollout.advantages(config.gamma, config.gae_lambda)
        told: dict[str, Any] = {
            "explained_variance": explained_variance(rollout.values, returns, rollout.valid, pool)
        }
        advantages = normalise_advantages(raw, rollout.valid, pool)
        weight, rate = (config.annealed(name, self.decisions) for name in ("entropy", "lr"))
        self.optimizer.param_groups[0]["lr"] = rate
        traces, stopped, counts = self._passes(rollout, advantages, returns, weight)
        stale = self._stale_state_error(rollout)
        self.network.observation_stats.update(_finite(rollout.states[rollout.valid]), pool)
        self.network.update_return_stats(_finite(returns[rollout.valid][:, None]), pool)
        self.decisions += int(counts[-1])
        self.updates += 1
        told |= {
            "early_stop_epoch": stopped,
            "stale_state_error": stale,
            "decisions": self.decisions,
        }
        told |= {"lr": rate, "entropy_weight": weight}
        return summarise(
            traces, self.network.spec.names, config.clip, counts[:-1].tolist(), self.team, **told
        )

    def _passes(
        self, rollout: Rollout, advantages: Tensor, returns: Tensor, weight: float
    ) -> tuple[list[MinibatchTrace], int | None, Tensor]:
        """All minibatches, or those up to one that goes too far, and its pass; decisions of each
        head, and of all.
        """
        traces: list[MinibatchTrace] = []
        is_relevant, is_open, counts = self._look_through(rollout)
        decisions = counts[: len(is_relevant) + 1].sum(1)
        for epoch in range(self.config.epochs):
            for part in self._assign(rollout.total * rollout.per_row):
                index = part - rollout.first * rollout.per_row
                index = index[
                    (index >= 0) & (index < len(is_relevant[0]))
                ]  # of each minibatch, what is here
                steps = HeadSteps.of(is_relevant[:, index], is_open[:, index], counts[:, part])
                own = rollout.cut(advantages, index), rollout.cut(returns, index)
                traces.append(self._step(rollout, index, steps, *own, weight))
                if traces[-1].gradient_norm is None:
                    return traces, epoch, decisions
        return traces, None, decisions

    def _look_through(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Where each head took part and where it had a choice, here; and the counts of every piece
        of all processes.
        """
        rows = rollout.rows(torch.arange(rollout.count * rollout.per_row, device=self.device))
        is_relevant = relevant_steps(self.network.spec, rows.choices, rows.valid)
        is_open = openings(self.network.spec, rows.masks, rows.valid)
        own = counts_by_row(is_relevant, rows.valid, is_open)
        counts = own.new_zeros(len(own), rollout.total * rollout.per_row)
        counts[:, rollout.first * rollout.per_row :][:, : len(own[0])] = own
        return is_relevant, is_open, self.team.sum(counts)

    def _assign(self, total: int) -> list[Tensor]:
        """All processes' pieces in a fresh order, in `minibatches` parts."""
        order = torch.randperm(total, generator=self.shuffles).to(self.device)
        return list(order.tensor_split(min(self.config.minibatches, total)))

    def _step(
        self,
        rollout: Rollout,
        index: Tensor,
        steps: HeadSteps,
        advantages: Tensor,
        returns: Tensor,
        weight: float,
    ) -> MinibatchTrace:
        config, rows = self.config, rollout.rows(index)
        new, values, entropy = self._judge(rows)
        old = rows.log_probs.movedim(-1, 0)
        policy = policy_loss(new, old, advantages, steps, rows.valid, config.clip, config.clip_mode)
        scale = self.network.return_stats.std.to(values.dtype)
        value = value_loss(
            values, rows.values, returns, rows.valid, config.value_clip, scale, steps.valid
        )
        entropies = mean_entropy(entropy, steps, rows.valid)
        norm, kl = self._descend(
            policy.total + config.value_weight * value - weight * entropies.sum(), policy.kl
        )
        here = rollout.first + index // rollout.per_row, rollout.begins(index)
        losses = policy.per_head.detach(), entropies.detach(), value.detach()
        return MinibatchTrace(
            *here, policy.log_ratios, steps.is_relevant, rows.valid, *losses, kl, norm
        )

    def _judge(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, values and entropies; without rows there are none of them."""
        names = self.network.spec.names
        if not len(rows.states):
            none = rows.values.new_zeros(len(names), *rows.valid.shape)
            return none, rows.values, none
        said = self._evaluate(
            rows.states, rows.choices, rows.masks, rows.hidden, rows.starts, needs_state=False
        )
        new, entropy = (
            torch.stack([found[name] for name in names]) for found in (said.log_probs, said.entropy)
        )
        return new, said.values, entropy

    def _descend(self, loss: Tensor, kl: Tensor) -> tuple[Tensor | None, Tensor]:
        """One step, unless gradients are not finite or the policy went too far (no norm); and all
        ranks' divergence.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:
            loss.backward()
        kl = self.team.sum_gradients(self.network.parameters(), kl)
        if self.config.target_kl is not None and bool(kl > KL_SLACK * self.config.target_kl):
            return None, kl
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_grad_norm)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        return at_least_single(norm), kl

    @torch.no_grad()
    def _stale_state_error(self, rollout: Rollout) -> float:
        """Mean squared difference of stored and recomputed state at the ends of pieces where
        episodes go on, or 0.
        """
        lasts = [*range(rollout.piece - 1, rollout.steps - 1, rollout.piece), rollout.steps - 1]
        goes_on = (rollout.valid & ~rollout.ended)[lasts]
        if not bool(goes_on.any()):
            return 0.0
        (kept, cell), each = rollout.hidden, rollout.per_row
        later = [*(kept[:, number::each] for number in range(1, each)), rollout.end_hidden[0]]
        found, fresh = [], (kept[:, ::each].contiguous(), cell[:, ::each].contiguous())
        for last, is_on, stored in zip(lasts, goes_on, later, strict=True):
            now = slice(last // rollout.piece * rollout.piece, last + 1)
            fresh = self.network.follow(
                rollout.states[now].transpose(0, 1), fresh, rollout.starts[now].T
            )
            found.append((fresh[0] - stored)[:, is_on])
        return float(torch.cat(found, 1).square().mean())


def _finite(rows: Tensor) -> Tensor:
    """The rows that statistics may take in: one NaN would stay in them for ever."""
    return rows[rows.isfinite().all(1)]


def _plain_codecs(network: RecurrentActorCritic) -> Codecs:
    """Codecs for numbers as the network reads and writes them."""
    observation_space = gym.spaces.Box(-np.inf, np.inf, (network.state_dim,))
    action_space = gym.spaces.MultiDiscrete([*network.spec.sizes])
    return Codecs(ObservationCodec(observation_space), ActionCodec(action_space, network.spec))
