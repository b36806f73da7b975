"""Esper grows neural networks while they train. Importing it is light: what needs torch loads when it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "deepen": "esper.deepening",
    "grow": "esper.garden",
    "inspect": "esper.garden",
    "load": "esper.garden",
    "Garden": "esper.garden",
    "GrowthSettings": "esper.kasmina",
    "MorphogeneticModel": "esper.kasmina",
    "StageLengths": "esper.leyline",
    "EsperError": "esper.leyline",
    "blueprint": "esper.kasmina",
    "check_blueprint": "esper.kasmina",
    "check_host": "esper.kasmina",
}
__all__ = [
    "EsperError",
    "Garden",
    "GrowthSettings",
    "MorphogeneticModel",
    "StageLengths",
    "__version__",
    "blueprint",
    "check_blueprint",
    "check_host",
    "deepen",
    "grow",
    "inspect",
    "load",
]

if TYPE_CHECKING:
    from esper.deepening import deepen
    from esper.garden import Garden, grow, inspect, load
    from esper.kasmina import GrowthSettings, MorphogeneticModel, blueprint, check_blueprint, check_host
    from esper.leyline import EsperError, StageLengths


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
