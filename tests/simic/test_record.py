"""Every field of an update's record, against a learner that goes through decisions one by one."""

import copy
import math
from dataclasses import fields

import pytest
import torch

from esper.simic.ppo.agent import KL_SLACK
from esper.simic.ppo.diagnostics import UpdateRecord
from simic.worlds import SMALL, growth_agent, growth_rollout


class SlowLearner:
    """PPO as the paper has it, in loops over rows, steps and heads, with an optimiser and a network
    of its own.
    """

    def __init__(self, agent, rollout, assigned):
        self.network, self.config = copy.deepcopy(agent.network), agent.config
        self.rollout, self.assigned = rollout, assigned
        self.names = agent.network.spec.names
        self.optimizer = torch.optim.Adam(self.network.parameters(), self.config.lr, eps=1e-5)
        raw, self.returns = rollout.targets(self.config.gamma, self.config.gae_lambda)
        known = raw[rollout.valid]
        self.advantages = (raw - known.mean()) / known.std(unbiased=False)
        self.ratios = {name: [] for name in (*self.names, "joint")}
        self.losses, self.values, self.entropies = (
            {name: [] for name in self.names},
            [],
            {n: [] for n in self.names},
        )
        self.policy, self.norms, self.kl, self.stopped, self.first = [], [], math.nan, None, None

    def decisions(self, rows):
        """(said, place) of every valid decision of some rows; each row is judged by itself."""
        for row in rows.tolist():
            here = self.rollout.rows(torch.tensor([row]))
            said = self.network.evaluate_actions(
                here.states, here.choices, here.masks, here.hidden, here.starts
            )
            for step in range(self.rollout.steps):
                if self.rollout.valid[step, row]:
                    yield said, step, row

    def uses(self, step, row):
        op = int(self.rollout.choices[step, row, 0])
        return [
            head.name
            for head in self.network.spec.heads
            if head.used_by is None or op in head.used_by
        ]

    def surrogate(self, ratio, advantage):
        kept = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        return -torch.minimum(ratio * advantage, kept * advantage)

    def minibatch(self, rows):
        shares = {name: [] for name in self.names}
        joint_shares, values, kls, open_entropies = [], [], [], {name: [] for name in self.names}
        for said, step, row in self.decisions(rows):
            advantage, total = self.advantages[step, row], torch.zeros(())
            for place, name in enumerate(self.names):
                if name in self.uses(step, row):
                    change = (
                        said.log_probs[name][0, step] - self.rollout.log_probs[step, row, place]
                    )
                    shares[name].append(self.surrogate(change.exp(), advantage))
                    self.ratios[name].append(change.exp().item())
                    total = total + change
                if said.entropy[name][0, step] > 0:
                    open_entropies[name].append(said.entropy[name][0, step])
            joint_shares.append(self.surrogate(total.exp(), advantage))
            self.ratios["joint"].append(total.exp().item())
            kls.append((total.exp() - 1 - total).item())
            values.append(self.value_share(said.values[0, step], step, row))
        if self.first is None:
            self.first = {
                name: max((abs(r - 1) for r in found), default=0.0)
                for name, found in self.ratios.items()
            }
        means = {name: sum(found) / max(1, len(found)) for name, found in shares.items()}
        entropies = {
            name: sum(found) / max(1, len(found)) for name, found in open_entropies.items()
        }
        if self.config.clip_mode == "joint":
            means = dict.fromkeys(self.names, sum(joint_shares) / len(joint_shares))
        policy = means["op"] if self.config.clip_mode == "joint" else sum(means.values())
        value, self.kl = sum(values) / len(values), sum(kls) / len(kls)
        for name in self.names:
            self.losses[name].append(number(means[name]))
            self.entropies[name].append(number(entropies[name]))
        self.policy.append(number(policy))
        self.values.append(number(value))
        return (
            policy
            + self.config.value_weight * value
            - self.config.entropy * sum(entropies.values())
        )

    def value_share(self, new, step, row):
        scale = self.network.return_stats.std.item()
        old, target = self.rollout.values[step, row], self.returns[step, row]
        kept = old + (new - old).clamp(
            -self.config.value_clip * scale, self.config.value_clip * scale
        )
        return 0.5 * torch.maximum((new - target).square(), (kept - target).square()) / scale**2

    def run(self):
        count = self.config.minibatches
        for place, rows in enumerate(self.assigned):
            loss = self.minibatch(rows)
            if self.config.target_kl is not None and self.kl > KL_SLACK * self.config.target_kl:
                self.stopped = place // count
                return
            self.optimizer.zero_grad()
            loss.backward()
            parameters = [value for value in self.network.parameters() if value.grad is not None]
            norm = math.sqrt(sum(float(value.grad.square().sum()) for value in parameters))
            for value in parameters:
                value.grad.mul_(min(1.0, self.config.max_grad_norm / norm))
            self.norms.append(norm)
            self.optimizer.step()

    def stale(self):
        errors = []
        for row in range(self.rollout.count):
            if not self.rollout.ended[-1, row]:
                here = self.rollout.rows(torch.tensor([row]))
                after = self.network.follow(here.states, here.hidden, here.starts)[0][0, 0]
                errors.append((after - self.rollout.end_hidden[0][0, row]).square().mean().item())
        return sum(errors) / len(errors)


def number(found):
    return torch.as_tensor(found).item()


def mean(numbers):
    return sum(numbers) / len(numbers)


def deviation(numbers):
    return math.sqrt(mean([(number - mean(numbers)) ** 2 for number in numbers]))


def far(ratios, clip):
    return mean([float(abs(ratio - 1) > clip) for ratio in ratios])


@pytest.mark.parametrize(
    "changes",
    [
        {"target_kl": None, "lr": 0.05, "lr_floor": 0.0},
        {"target_kl": 0.05, "lr": 0.05, "lr_floor": 0.0},
        {"clip_mode": "joint", "target_kl": None, "lr": 0.05},
    ],
    ids=["whole", "cut short", "joint"],
)
def test_every_field_of_a_record_is_what_a_slow_learner_finds(changes):
    agent = growth_agent(
        SMALL.model_copy(update={"epochs": 3, "max_grad_norm": 0.3, **changes}), seed=3
    )
    rollout = growth_rollout(agent, steps=6, count=4, seed=3)
    other = copy.deepcopy(agent)
    slow = SlowLearner(agent, rollout, [rows for _ in range(3) for rows in other._assign(4)])
    slow.run()
    stale = slow.stale()
    record = agent.update(rollout)

    def close(number):
        return pytest.approx(number, rel=1e-3, abs=1e-5)

    joint, clip = slow.ratios["joint"], agent.config.clip
    known = slow.returns[rollout.valid]
    expected = {
        "policy_loss": close(mean(slow.policy)),
        "value_loss": close(mean(slow.values)),
        "entropy": close(mean([mean(found) for found in slow.entropies.values()])),
        "explained_variance": close(
            1 - float((known - rollout.values[rollout.valid]).var() / known.var())
        ),
        "ratio_mean": close(mean(joint)),
        "ratio_std": close(deviation(joint)),
        "ratio_max": close(max(joint)),
        "ratio_min": close(min(joint)),
        "approx_kl": close(slow.kl),
        "clip_fraction": close(far(joint, clip)),
        "early_stop_epoch": slow.stopped,
        "gradient_norm": close(mean(slow.norms)),
        "steps": len(slow.norms),
        "skipped_steps": 0,
        "stale_state_error": close(stale),
        "lr": 0.05,
        "entropy_weight": 0.01,
        "decisions": 24,
        "judged": sum(6 * len(rows) for rows in slow.assigned[: len(slow.policy)]),
    }
    assert {name: getattr(record, name) for name in expected} == expected
    assert record.first_ratio_gap == pytest.approx(slow.first, abs=1e-6)
    for name, head in record.heads.items():
        used = sum(name in slow.uses(step, row) for step in range(6) for row in range(4))
        assert (head.loss, head.entropy) == (
            close(mean(slow.losses[name])),
            close(mean(slow.entropies[name])),
        )
        assert head.clip_fraction == close(far(slow.ratios[name], clip))
        assert head.ratio_max == close(max(slow.ratios[name]))
        assert head.steps == used
    extremes = [max(r, 1 / r) for name in slow.names for r in slow.ratios[name]]
    worst = record.explosion.worst[0].ratio
    assert max(worst, 1 / worst) == close(max(extremes))
    named = {*expected, "first_ratio_gap", "heads", "explosion", "first_worst"}
    assert named == {field.name for field in fields(UpdateRecord)}
    assert (record.early_stop_epoch is not None) == (
        "target_kl" in changes and changes["target_kl"] is not None
    )
