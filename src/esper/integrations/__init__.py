"""Growing inside other people's training loops. Each module needs its framework, and is imported by its own name."""

from importlib import import_module

from esper.leyline.errors import SettingError

GARDEN = "garden"
"""folder of the garden inside a framework's own checkpoint"""


def require(framework: str) -> None:
    """Say in one line what is missing, and how to get it."""
    try:
        import_module(framework)
    except ImportError as problem:
        text = f"esper.integrations.{framework} needs {framework} ({problem}); pip install {framework}."
        raise SettingError(text) from problem
