"""Esper grows neural networks while they train. Importing it is light: what needs torch loads when it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.deepening import deepen as deepen
    from esper.garden import Garden as Garden
    from esper.garden import grow as grow
    from esper.garden import inspect as inspect
    from esper.garden import load as load
    from esper.kasmina.blueprints import blueprint as blueprint
    from esper.kasmina.checks import check_blueprint as check_blueprint
    from esper.kasmina.checks import check_host as check_host
    from esper.kasmina.model import MorphogeneticModel as MorphogeneticModel
    from esper.kasmina.settings import GrowthSettings as GrowthSettings
    from esper.leyline.errors import EsperError as EsperError
    from esper.leyline.lifecycle import StageLengths as StageLengths

__version__ = "0.2.0"

_HOMES = {
    "deepen": "esper.deepening",
    **dict.fromkeys(("Garden", "grow", "inspect", "load"), "esper.garden"),
    "blueprint": "esper.kasmina.blueprints",
    "check_blueprint": "esper.kasmina.checks",
    "check_host": "esper.kasmina.checks",
    "MorphogeneticModel": "esper.kasmina.model",
    "GrowthSettings": "esper.kasmina.settings",
    "EsperError": "esper.leyline.errors",
    "StageLengths": "esper.leyline.lifecycle",
}
__all__ = list(_HOMES)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
