"""Reports and signals made by hand, and populations watched through trackers, for the tests of this
folder.
"""

from dataclasses import fields, replace

import numpy as np
import torch

from esper.episodes import Episodes
from esper.kasmina.hosts import build_cnn_host, build_transformer_host
from esper.leyline.lifecycle import StageLengths
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Splits, TokenSplit
from esper.runtime.tasks.registry import get_task
from esper.tamiyo.masks import compute_batch_masks
from esper.tamiyo.policy_files import Layout
from esper.tamiyo.readings import observe
from esper.tamiyo.signals import EpochSignals, SignalTracker
from runtime.episodes import BLOBS, IMAGES

THREE = SlotConfig.default()
METRICS = {field.name for field in fields(SeedMetrics)}
SHORT = StageLengths(embargo=1, resetting=1)


def epoch_signals(loss=0.5, accuracy=0.7, **others):
    """One healthy epoch, except for what is said."""
    values = {
        "progress": 0.25,
        "lr_share": 1.0,
        "train_loss": 0.4,
        "held_out_loss": loss,
        "train_accuracy": 0.8,
    }
    values |= {"held_out_accuracy": accuracy, "params_share": 0.5, "seeds_share": 0.0}
    return EpochSignals(**{**values, **others})


def report(slot="r0c0", stage=SeedStage.DORMANT, **values):
    """A slot's report; names of metrics are put into them."""
    metrics = SeedMetrics(**{name: value for name, value in values.items() if name in METRICS})
    rest = {name: value for name, value in values.items() if name not in METRICS}
    return SeedStateReport(slot, stage, metrics=metrics, **rest)


def reports_of(slots=THREE, **given):
    """One report per slot: dormant, or as `slot={...}` says."""
    return {slot: report(slot, **given.get(slot, {})) for slot in slots.slot_ids}


def tracker_after(*epochs, slots=THREE, scale=1.0, reports=None):
    tracker = SignalTracker(slots, scale)
    for signals in epochs:
        tracker.update(signals, reports or reports_of(slots))
    return tracker


# -- populations -----------------------------------------------------------------------------------


def _texts():
    """Each token is the sum of the two before it."""
    tokens = torch.randint(5, (2,), generator=torch.Generator().manual_seed(1)).tolist()
    while len(tokens) < 700:
        tokens.append((tokens[-1] + tokens[-2] + (len(tokens) % 7 == 0)) % 5)
    train, validation, test = (
        torch.tensor(tokens[a:b]) for a, b in ((0, 400), (400, 550), (550, 700))
    )
    return Splits(
        TokenSplit(train, 12), TokenSplit(validation, 12), SealedSplit(TokenSplit(test, 12))
    )


TASKS = {
    "images": replace(IMAGES, lengths=SHORT),
    "vectors": replace(BLOBS, epoch_examples=128, lengths=SHORT, scale_at_birth=1.0),
    "texts": replace(
        get_task("python_text"),
        load=lambda root: _texts(),
        build_host=lambda: build_transformer_host(
            vocabulary=5, width=8, layers=2, heads=2, context=12, slots=2
        ),
        chance=0.2,
        batch=16,
        epoch_examples=32,
        epochs=12,
        lengths=SHORT,
    ),
    "three slots": replace(
        IMAGES,
        build_host=lambda: build_cnn_host(blocks=3, base_channels=4, in_channels=1, image_size=8),
        lengths=StageLengths(training=1, ramp=1, embargo=1, resetting=1),
        blueprints=("norm", "conv_small", "depthwise"),
    ),
}
"""Every kind of slot; the last one incubates its seeds."""


class Watched:
    """A population and what its policies see of it."""

    def __init__(self, task, seeds):
        self.task = task
        self.episodes = Episodes(Population(task, seeds))
        self.population = self.episodes.population
        self.space = self.population.views()[0].space

    @property
    def trackers(self):
        return self.episodes.trackers

    def sights(self):
        """What is read of every host."""
        return [self.episodes.sight(host) for host in range(len(self.trackers))]

    def train(self, lacking=()):
        """One epoch; the observations and masks that come of it."""
        self.episodes.train()
        sights = self.sights()
        seen = observe(sights, lacking=[lacking] * len(sights))
        return seen, compute_batch_masks(self.episodes.views)

    def signals(self):
        """What rules are given of every host."""
        return [tracker.signals for tracker in self.trackers]

    def act(self, actions):
        """Carry out [N, 4]; an illegal action raises its refusal."""
        for host, (op, slot, blueprint, blend) in enumerate(actions.tolist()):
            self.population.apply(host, (op, slot, blueprint, blend))
        self.population.tick()

    def live(self, policy, epochs, memory=None):
        """A policy's decisions, epoch by epoch: observations, masks and actions."""
        lived = []
        for _ in range(epochs):
            seen, masks = self.train()
            actions, memory = policy.decide(
                seen, masks, self.population.reports(), memory, self.signals()
            )
            lived.append((seen, masks, actions))
            self.act(actions)
        return lived

    def network(self, seed=0):
        """A fresh growth policy for this population."""
        torch.manual_seed(seed)
        return Layout.of(self.space, 16, 8).build()


def draw_action(masks, host, draw):
    """One action of one host, drawn head by head as the masks allow."""
    own = {head: mask[host] for head, mask in masks.items()}
    op = draw.choice(np.flatnonzero(own["op"]))
    slot = draw.choice(np.flatnonzero(own["slot"][op]))
    if op != 1:
        return op, slot, 0, 0
    return (
        op,
        slot,
        draw.choice(np.flatnonzero(own["blueprint"][slot])),
        draw.choice(np.flatnonzero(own["blend"])),
    )


class RandomPolicy:
    """Draws evenly, head by head, from what the masks allow."""

    def __init__(self, seed):
        self.draw = np.random.default_rng(seed)

    def decide(self, observation, masks, reports, memory, signals):
        hosts = range(len(masks["op"]))
        return np.array([draw_action(masks, host, self.draw) for host in hosts], np.int64), memory
