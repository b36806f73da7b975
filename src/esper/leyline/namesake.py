"""The distribution `esper`, a game engine's entity-component system, has our import name.

Two distributions of one name overwrite each other's files, or the first on the path hides the
second; either way a user sees errors that do not name the cause.
"""

import os
import sys
import warnings

import esper
from esper.leyline.errors import SettingError

_CURE = (
    "Use an environment for each, or: pip uninstall esper && "
    "pip install --force-reinstall --no-deps esper-lite"
)


def find_namesake() -> str | None:
    """Return where the other distribution is noted on the import path; None if it is not.

    Folders are listed, no metadata is read: `import esper` pays for this.
    """
    for folder in filter(None, sys.path):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.startswith("esper-") and name.endswith((".dist-info", ".egg-info")):
                return os.path.join(folder, name)
    return None


def warn_of_namesake() -> None:
    """Warn in one line where both distributions are installed."""
    place = find_namesake()
    if place is not None:
        warnings.warn(
            f"the game library esper is installed too ({place}), and both are imported as esper, "
            f"so one hides or overwrites the other. {_CURE}",
            stacklevel=3,
        )


def require_own_package() -> None:
    """Refuse where `import esper` gives the other distribution."""
    if "grow" not in getattr(esper, "__all__", ()):
        raise SettingError(
            f"import esper gives another library ({esper.__file__}), which has taken the place of "
            f"esper-lite. {_CURE}"
        )
