"""What can be installed beside the core, and the one line that says what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from esper.leyline.errors import MissingExtraError

EXTRAS = {
    "cli": ("typer", "rich"),
    "rl": ("gymnasium",),
    "demo": ("sklearn",),
    "data": ("pooch",),
    "tui": ("textual",),
    "web": ("starlette", "uvicorn"),
    "track": ("tensorboard", "wandb"),
    "export": ("onnx", "onnxscript"),
    "pandas": ("pandas",),
}
"""The modules that each extra of pyproject.toml brings, beside those of extras that it contains."""


def install_command(*extras: str) -> str:
    """Return the command that installs extras."""
    return f"pip install 'esper-lite[{','.join(extras)}]'"


def is_installed(module: str) -> bool:
    """Say whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # it is blocked
        return False


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Turn a module of an extra that is not installed into one line; `what` is what needs it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if not any(package in modules for modules in EXTRAS.values()):
            raise
        raise MissingExtraError(
            f"{what} needs {package}. Install it: {install_command(extra)}"
        ) from missing
