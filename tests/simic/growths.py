"""Small growth environments and scripted episodes, for the tests of the environment, its rewards
and their exploits.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, OP_WAIT
from esper.leyline.lifecycle import StageLengths
from esper.runtime.tasks.registry import get_task
from esper.simic.environment import GrowthVectorEnv
from esper.simic.rewards import FAMILIES
from esper.simic.twins import raise_twins
from esper.telemetry.events import ActionRefused
from runtime.episodes import IMAGES

WAIT = (OP_WAIT, 0, 0, 0)
LORA, MLP = 1, 2
"""Blueprints of `blobs`, by their place in its action space."""
POINTS = replace(
    get_task("blobs"),
    epochs=8,
    epoch_examples=64,
    lengths=StageLengths(embargo=0, resetting=0),
)
"""Two slots, linear host, two training steps per epoch."""
PICTURES = replace(IMAGES, epochs=6, epoch_examples=48)
"""Two slots, batch norm, augmentation, gates and ramps of two epochs."""
BUSY = {
    0: (OP_GERMINATE, 0, MLP, 0),
    2: (OP_FOSSILIZE, 0, 0, 0),
    3: (OP_GERMINATE, 1, LORA, 2),
    4: (OP_CULL, 1, 0, 0),
    5: (OP_GERMINATE, 0, MLP, 0),
}
"""Every op in one episode of POINTS: what is decided at which step."""
PLANT = BUSY[0]
BOTH = {**FAMILIES["lead"], **FAMILIES["loss"]}
"""The terms of both families at once, so that one episode says what either pays."""
EVERY_TERM = {**BOTH, **FAMILIES["contribution"]}


class Step(NamedTuple):
    """What the environment answered."""

    obs: Any
    rewards: Any
    terminated: Any
    truncated: Any
    info: dict[str, Any]


def grow(task, count, folder, seeds=(3, 4, 5, 6), **options):
    return GrowthVectorEnv(task, count, host_seeds=seeds, folder=folder, **options)


def always(action):
    return lambda step, host, masks, reports: action


def scripted(script, hosts=None):
    """The same script for every host, or for those named; the others wait."""
    return lambda step, host, masks, reports: (
        script.get(step, WAIT) if hosts is None or host in hosts else WAIT
    )


def wander(step, host, masks, reports):
    """Something legal, drawn head by head from numbers that depend on host and step alone."""
    draw = np.random.default_rng([host, step])
    op = int(draw.choice(np.flatnonzero(masks["op"])))
    slot = int(draw.choice(np.flatnonzero(masks["slot"][op])))
    if op != OP_GERMINATE:
        return op, slot, 0, 0
    return (
        op,
        slot,
        int(draw.choice(np.flatnonzero(masks["blueprint"][slot]))),
        int(draw.choice(np.flatnonzero(masks["blend"]))),
    )


def play(env, policy, steps=None, seed=0, meddle=lambda env, step: None):
    """A whole episode by default.

    The first of the answers is the reset's; `meddle` is called before every step.
    """
    obs, info = env.reset(seed=seed)
    none = np.zeros(env.num_envs)
    lived = [Step(obs, none, none.astype(bool), none.astype(bool), info)]
    for step in range(env.task.epochs - 1 if steps is None else steps):
        meddle(env, step)
        lived.append(decide(env, policy, step, lived[-1].info))
    return lived


def refusals(lived):
    """How many actions of these steps were refused."""
    return sum(
        isinstance(event, ActionRefused)
        for step in lived
        for told in step.info["events"]
        for event in told
    )


def decide(env, policy, step, info):
    """One step of all hosts."""
    actions = [
        policy(
            step,
            host,
            {head: mask[host] for head, mask in info["action_mask"].items()},
            info["reports"][host],
        )
        for host in range(env.num_envs)
    ]
    return Step(*env.step(np.array(actions)))


def poison(env, host, value=math.nan):
    with torch.no_grad():
        next(env.population.runs[host].model.host.parameters()).fill_(value)


def poisoner(host, *steps):
    """Breaks one host right before the steps named."""
    return lambda env, step: poison(env, host) if step in steps else None


def kinds(events, kind):
    return [event for event in events if isinstance(event, kind)]


def differing_steps(first, second, hosts):
    """(step, host) pairs whose observation, reward, end, masks, parts or ledger are not equal to
    the bit.
    """
    return [
        (step, host)
        for step, (left, right) in enumerate(zip(first, second, strict=True))
        for host in hosts
        if not _is_same(left, right, host)
    ]


def _is_same(left, right, host):
    plain = [name for name in ("reward_parts", "ledger", "reports", "events") if name in left.info]
    masks, others = left.info["action_mask"], right.info["action_mask"]
    return (
        np.array_equal(left.obs[host], right.obs[host])
        and (left.rewards[host], left.terminated[host])
        == (right.rewards[host], right.terminated[host])
        and all(np.array_equal(masks[head][host], others[head][host]) for head in masks)
        and all(left.info[name][host] == right.info[name][host] for name in plain)
    )


def twin_readings(task, seeds, folder):
    """The readings of twins, by random seed."""
    return {seed: twin.readings for seed, twin in raise_twins(task, seeds, folder).items()}
