"""The distribution `esper`, a game engine's entity-component system, has our import name.

Two distributions of one name overwrite each other's files, or the first on the path hides the
second; either way a user sees errors that do not name the cause.
"""

import os
import sys
import warnings
from types import ModuleType

from esper.leyline.errors import SettingError

CURE = "pip uninstall esper && pip install --force-reinstall --no-deps esper-lite"
"""The command that leaves ours; the other library then needs an environment of its own."""

_ADVICE = f"Use an environment for each, or: {CURE}"


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
            f"so one hides or overwrites the other. {_ADVICE}",
            stacklevel=3,
        )


def require_own(package: ModuleType) -> None:
    """Refuse where the package that `import esper` gives is that of the other distribution."""
    if "grow" not in getattr(package, "__all__", ()):
        raise SettingError(
            f"import esper gives another library ({package.__file__}), which has taken the place "
            f"of esper-lite. {_ADVICE}"
        )
