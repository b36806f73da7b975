"""Files of policies that nobody has taught, for tests that need one."""

import json

import torch

from esper.leyline.factored_actions import ActionSpace
from esper.leyline.slots import SlotConfig
from esper.simic.ppo.agent import PPOAgent
from esper.storage.files import digest
from esper.tamiyo.policy_files import Layout
from tamiyo.policy_cases import sharpen

SPACE = ActionSpace(SlotConfig(("r0c0", "r0c1", "r0c2")))
"""Slots and blueprints that no model of the tests has."""


def write_policy(path, seed=1, factor=100, space=SPACE, **options):
    """A policy file with random weights, whose logits are `factor` times as far from even."""
    layout = Layout.of(space, 16, 8, **options)
    torch.manual_seed(seed)
    agent = PPOAgent(sharpen(layout.build(), factor))
    agent.layout = layout
    agent.save(path)
    return path


def ship(folder, monkeypatch, **options):
    """Let a random policy be the one that comes with the package."""
    path = write_policy(folder / "pretrained.safetensors", **options)
    path.with_suffix(".json").write_text(json.dumps({"sha256": digest(path)}))
    monkeypatch.setattr("esper.tamiyo.policy_names.SHIPPED", path)
    return path
