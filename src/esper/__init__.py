"""Esper grows neural networks while they train.

Importing it is light: what needs torch loads when it is used. Where gymnasium is installed, it
knows every built-in task from then on, as in `gymnasium.make("esper/blobs-v0")`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from esper.leyline.extras import is_installed, needs
from esper.leyline.namesake import warn_of_namesake
from esper.runtime.tasks.gymnasium_ids import register_built_in

__version__ = "0.4.0.dev0"

__all__ = [
    "DepthSchedule",
    "EsperError",
    "Garden",
    "GrowthEnv",
    "GrowthSettings",
    "GrowthVectorEnv",
    "HostFacts",
    "MorphogeneticModel",
    "PPOAgent",
    "PPOConfig",
    "Signals",
    "Span",
    "StageLengths",
    "StepFacts",
    "Task",
    "TrainingConfig",
    "Variety",
    "__version__",
    "blueprint",
    "check_blueprint",
    "check_host",
    "compile_layers",
    "deepen",
    "fork",
    "grow",
    "inspect",
    "learn",
    "load",
    "read_run",
    "register_task",
    "reward_family",
    "reward_term",
    "rule",
    "task_from_datasets",
    "train_ppo",
]

# the module that each public name is imported from when it is first used
_HOMES = {
    "esper.dashboard.tables": ("read_run",),
    "esper.garden.deepening": ("deepen",),
    "esper.garden.depth_schedule": ("DepthSchedule",),
    "esper.garden.forking": ("fork",),
    "esper.garden.garden": ("Garden",),
    "esper.garden.grow": ("grow", "inspect", "load"),
    "esper.garden.layer_compiling": ("compile_layers",),
    "esper.kasmina.blueprints": ("blueprint",),
    "esper.kasmina.checks": ("check_blueprint", "check_host"),
    "esper.kasmina.model": ("MorphogeneticModel",),
    "esper.leyline.settings": ("GrowthSettings",),
    "esper.leyline.errors": ("EsperError",),
    "esper.leyline.lifecycle": ("StageLengths",),
    "esper.runtime.tasks.datasets": ("task_from_datasets",),
    "esper.runtime.tasks.families": ("Span", "Variety"),
    "esper.runtime.tasks.registry": ("register_task",),
    "esper.runtime.tasks.task": ("Task",),
    "esper.simic": ("PPOAgent", "PPOConfig", "learn"),
    "esper.simic.config": ("TrainingConfig",),
    "esper.simic.environment": ("GrowthVectorEnv",),
    "esper.simic.gymnasium_envs": ("GrowthEnv",),
    "esper.simic.rewards": ("StepFacts", "reward_family", "reward_term"),
    "esper.simic.training": ("train_ppo",),
    "esper.tamiyo.rules": ("HostFacts", "rule"),
    "esper.tamiyo.signals": ("Signals",),
}

if TYPE_CHECKING:
    from esper.dashboard.tables import read_run
    from esper.garden.deepening import deepen
    from esper.garden.depth_schedule import DepthSchedule
    from esper.garden.forking import fork
    from esper.garden.garden import Garden
    from esper.garden.grow import grow, inspect, load
    from esper.garden.layer_compiling import compile_layers
    from esper.kasmina.blueprints import blueprint
    from esper.kasmina.checks import check_blueprint, check_host
    from esper.kasmina.model import MorphogeneticModel
    from esper.leyline.errors import EsperError
    from esper.leyline.lifecycle import StageLengths
    from esper.leyline.settings import GrowthSettings
    from esper.runtime.tasks.datasets import task_from_datasets
    from esper.runtime.tasks.families import Span, Variety
    from esper.runtime.tasks.registry import register_task
    from esper.runtime.tasks.task import Task
    from esper.simic import PPOAgent, PPOConfig, learn
    from esper.simic.config import TrainingConfig
    from esper.simic.environment import GrowthVectorEnv
    from esper.simic.gymnasium_envs import GrowthEnv
    from esper.simic.rewards import StepFacts, reward_family, reward_term
    from esper.simic.training import train_ppo
    from esper.tamiyo.rules import HostFacts, rule
    from esper.tamiyo.signals import Signals

register_built_in()
warn_of_namesake()


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            with needs("rl", f"esper.{name}"):
                return getattr(import_module(home), name)
    raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = [*__all__, "__doc__", "__file__", "__path__"]
    if is_installed("gymnasium"):
        return names
    # help(esper) shows what can be used
    absent = {name for home in _HOMES if home.startswith("esper.simic") for name in _HOMES[home]}
    return [name for name in names if name not in absent]
