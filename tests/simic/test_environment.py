"""Growth as an environment: the order of a step, ends, what `info` says, isolation, the governor, other people's agents."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_GERMINATE, FactoredAction
from esper.leyline.legality import is_legal
from esper.leyline.stages import SeedStage
from esper.runtime.host import EpochReading
from esper.runtime.ledger import network_flops
from esper.runtime.population import Population
from esper.runtime.twins import twin_readings
from esper.simic.environment import MAX_ROLLBACKS, bridge_gaps, draw_host_seeds, typical_change
from esper.simic.rewards import FAMILIES, StepFacts, reward_parts
from esper.simic.single import GrowthEnv
from esper.tamiyo.masks import compute_batch_masks
from esper.tamiyo.observation import feature_names
from esper.telemetry.events import ActionRefused, ActionTaken, HostRolledBack, StageChanged
from simic.growths import (
    BUSY,
    LORA,
    MLP,
    PICTURES,
    POINTS,
    WAIT,
    always,
    decide,
    differing_steps,
    grow,
    play,
    poison,
    poisoner,
    scripted,
    wander,
)

PLANT = (OP_GERMINATE, 0, MLP, 0)
BOTH = {**FAMILIES["contribution"], **FAMILIES["loss"]}
every_task = pytest.mark.parametrize("task", [POINTS, PICTURES], ids=lambda task: task.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where twins are kept, so that they are computed once for all tests."""
    return tmp_path_factory.mktemp("twins")


def seen(step, env, host, feature):
    return float(step.obs[host][feature_names(env.space.slots).index(feature)])


# -- the order of a step -----------------------------------------------------------------------------------------------


def replay(task, seed, script):
    """The same life by hand: op, tick, train, measure; the facts that each decision is paid by."""
    population, twin = Population(task, [seed]), None
    run, space = population.runs[0], population.views()[0].space
    population.train_epoch()
    population.evaluate()
    for step in range(task.life - 1):
        before = run.reading
        op, slot, blueprint, blend = script.get(step, WAIT)
        population.apply(
            0,
            FactoredAction.from_indices(op_idx=op, slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, space=space),
        )
        population.tick()
        population.train_epoch()
        assert population.evaluate() == []
        twin = yield run.reading, _facts(population, before, op, twin, step + 2 == task.life)


def _facts(population, before, op, twins, is_last):
    run = population.runs[0]
    model, now = run.model, run.reading
    twin_before, twin, unit = twins
    added = model.total_params - model.host_params
    return StepFacts(
        accuracy=now.held_out_accuracy,
        accuracy_before=before.held_out_accuracy,
        twin_accuracy=twin.held_out_accuracy,
        twin_accuracy_before=twin_before.held_out_accuracy,
        loss=now.held_out_loss,
        loss_before=before.held_out_loss,
        twin_loss=twin.held_out_loss,
        twin_loss_before=twin_before.held_out_loss,
        loss_unit=unit,
        op=op,
        params_share=added / model.host_params,
        flops_share=network_flops(model, population.flops) / population.flops.whole - 1,
        kept_share=model.fossilized_params / added if added else 0.0,
        is_last=is_last,
    )
