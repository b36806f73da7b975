"""A growth problem without training: generated curves with a known right slot, blueprint and moment
for every host.

The lifecycle, masks and observation are the real ones; only the readings are made up. What is right
differs from host to host and can be read from the observation: the right slot has the highest
greedy score, the right blueprint follows from how far training runs ahead of held-out accuracy, and
the right moment is when the held-out loss stops falling.
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, ActionSpace
from esper.leyline.gates import Measurement
from esper.leyline.legality import GrowthView
from esper.leyline.lifecycle import SeedState, StageLengths, germinate, tick
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.masks import compute_batch_masks
from esper.tamiyo.policy_files import Layout
from esper.tamiyo.readings import Sight, layout_for, observe
from esper.tamiyo.rules import HostFacts
from esper.tamiyo.signals import EpochSignals, SignalTracker

SLOTS = 3
EPOCHS = 12
BLUEPRINTS = ("conv_light", "norm", "conv_small")
SPACE = ActionSpace.of(SlotConfig.default(), BLUEPRINTS)
SIZES = {"conv_light": 600, "norm": 100, "conv_small": 200}
COSTS = {
    (s, b, w): SIZES[b] for s in SPACE.slots.slot_ids for b in BLUEPRINTS for w in SPACE.blends
}
SPEC = HeadSpec.growth(*SPACE.sizes[1:])
LENGTHS = StageLengths(embargo=1)
HOST_PARAMS, MAX_SEEDS = 1000, 2
FULL_GAIN = 0.2


class Host:
    """One episode: its hidden truth, its slots and its curves."""

    def __init__(self, draw: np.random.Generator):
        self.slot, self.blueprint = int(draw.integers(SLOTS)), int(draw.integers(len(BLUEPRINTS)))
        self.moment = int(draw.integers(1, 6))
        self.scores = draw.uniform(0.2, 0.8, SLOTS)
        self.scores[self.slot] += draw.uniform(0.6, 1.2)
        self.start, self.pace = draw.uniform(0.3, 0.4), draw.uniform(0.03, 0.05)
        self.noise = draw.normal(0, 0.002, EPOCHS + 1)
        self.epoch = 0
        self.states = [SeedState() for _ in range(SLOTS)]
        self.planted: dict[int, tuple[float, int]] = {}
        self.kept = 0.0
        self.fossils = [0] * SLOTS
        self.tracker = SignalTracker(SPACE.slots, loss_scale=1.0)
        self.read()

    def worth(self, slot, blueprint):
        """What a seed planted now is good for."""
        if slot != self.slot:
            return -0.05
        late = abs(self.epoch - self.moment)
        return (
            FULL_GAIN * (1.0 if blueprint == self.blueprint else 0.3) * max(0.2, 1.0 - 0.3 * late)
        )

    def apply(self, op, slot, blueprint, blend):
        if op == OP_GERMINATE:
            self.states[slot] = germinate(SPACE.blueprint_ids[blueprint], SPACE.blends[blend])
            self.planted[slot] = (self.worth(slot, blueprint - 1), self.epoch)
        elif op == OP_CULL:
            self.states[slot] = self.states[slot].advance(SeedStage.CULLED)
        elif op == OP_FOSSILIZE:
            self.states[slot] = self.states[slot].advance(SeedStage.FOSSILIZED)
            self.keep(slot)

    def keep(self, slot):
        self.kept += self.gain(slot)
        self.fossils[slot] += 1

    def gain(self, slot):
        worth, since = self.planted[slot]
        return worth * min(1.0, 0.6 + 0.2 * (self.epoch - since))

    def live_epoch(self):
        """Tick, then a made-up epoch of training."""
        for slot, state in enumerate(self.states):
            after = tick(state, LENGTHS)
            if after.stage is SeedStage.FOSSILIZED and state.stage is SeedStage.PROBATIONARY:
                self.keep(slot)
            self.states[slot] = after
        self.epoch += 1
        for slot, state in enumerate(self.states):
            if state.stage is SeedStage.PROBATIONARY:
                self.states[slot] = state.measured(Measurement(self.gain(slot), 0.01, 500))
        self.read()

    @property
    def twin(self):
        return self.start + self.pace * min(self.epoch, self.moment)

    @property
    def beyond_twin(self):
        return self.kept + sum(
            s.alpha * self.gain(i) for i, s in enumerate(self.states) if s.is_live
        )

    @property
    def live(self):
        return sum(state.is_live for state in self.states)

    def read(self):
        accuracy = self.twin + self.beyond_twin
        ahead = (0.02, 0.15, 0.3)[self.blueprint]
        self.tracker.update(
            EpochSignals(
                progress=self.epoch / EPOCHS,
                lr_share=1.0,
                train_loss=1 - accuracy - ahead,
                held_out_loss=1 - accuracy + self.noise[self.epoch],
                train_accuracy=accuracy + ahead,
                held_out_accuracy=accuracy,
                params_share=0.5,
                seeds_share=(self.live + sum(self.fossils)) / MAX_SEEDS,
            ),
            self.reports(),
        )

    def reports(self):
        return {slot_id: self._report(i, slot_id) for i, slot_id in enumerate(SPACE.slots.slot_ids)}

    def _report(self, index, slot_id):
        state = self.states[index]
        found = state.contribution if state.is_live else None
        metrics = SeedMetrics(
            counterfactual_contribution=None if found is None else found.mean,
            counterfactual_standard_error=None if found is None else found.standard_error,
            seed_gradient_norm_ratio=1.0,
            seed_gradient_norm=1.0,
            greedy_score=float(self.scores[index]),
            seed_param_count=SIZES[state.blueprint_id] if state.is_live else 0,
            host_param_count=HOST_PARAMS,
        )
        return SeedStateReport(
            slot_id,
            state.stage,
            state.epochs_in_stage,
            state.age,
            state.alpha,
            state.blueprint_id,
            state.blend_id,
            fossil_count=self.fossils[index],
            metrics=metrics,
        )

    def view(self):
        used = self.live + sum(self.fossils)
        return GrowthView(
            space=SPACE,
            reports=self.reports(),
            seeds_used=used,
            max_seeds=MAX_SEEDS,
            params_used=HOST_PARAMS,
            budget=None,
            costs=COSTS,
            ramp=LENGTHS.ramp,
        )


class SurrogateGrowth(VectorEnv):
    """N such hosts side by side; reward is the change of accuracy beyond the twin, less a little
    rent.
    """

    heads = SPEC

    def __init__(self, count, lacking=()):
        self.num_envs = count
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.layout = layout_for(Host(np.random.default_rng(0)).view())
        self.lacking = lacking
        width = self.layout.width
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (width,), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete(SPACE.sizes)
        self.hosts = []

    def layout_of(self, hidden_dim, head_dim):
        return Layout.of(SPACE, hidden_dim, head_dim, lacking=self.lacking)

    def reset(self, *, seed=None, options=None):
        if seed is not None or not self.hosts:
            self.draws = [np.random.default_rng([seed or 0, host]) for host in range(self.num_envs)]
        self.hosts = [Host(draw) for draw in self.draws]
        return self._see()

    def _see(self):
        views = [host.view() for host in self.hosts]
        sights = [
            Sight(host.tracker.tracked, view, facts(), guessing=1.0)
            for host, view in zip(self.hosts, views, strict=True)
        ]
        obs = observe(sights, self.layout, [self.lacking] * self.num_envs)
        return obs, {"action_mask": compute_batch_masks(views)}

    def step(self, actions):
        before = [host.beyond_twin for host in self.hosts]
        for host, action in zip(self.hosts, np.asarray(actions).tolist(), strict=True):
            host.apply(*action)
            host.live_epoch()
        rewards = [
            10 * (host.beyond_twin - was) - 0.02 * host.live
            for host, was in zip(self.hosts, before, strict=True)
        ]
        over = np.array([host.epoch >= EPOCHS for host in self.hosts])
        obs, info = self._see()
        if over.all():
            last = obs
            obs, info = self.reset()
            info["final_obs"] = last
        return obs, np.array(rewards), over, np.zeros_like(over), info


def facts():
    return HostFacts(SPACE, COSTS, HOST_PARAMS, None, EPOCHS)


def mean_return(decide, count=64, seed=999):
    """Mean return of `decide(env, obs, masks, memory) -> actions, memory` over fresh hosts."""
    env = SurrogateGrowth(count)
    obs, info = env.reset(seed=seed)
    total, memory = np.zeros(count), None
    for _ in range(EPOCHS):
        actions, memory = decide(env, obs, info["action_mask"], memory)
        obs, rewards, _, _, info = env.step(actions)
        total += rewards
    return float(total.mean())
