"""Every error a caller can cause, and how it is worded.

Each says what it got, the rule, and the way out.
"""

import math
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, SupportsFloat

CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that a terminal obeys instead of showing them."""


def printable(text: str) -> str:
    """Text from a file, a folder's name or a user, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def is_number(value: object, least: float = -math.inf, *, is_whole: bool = False) -> bool:
    """Whether this is one finite number, numpy's and torch's too, and at least `least`."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several numbers, or too large
        return False
    return least <= number < math.inf and not (is_whole and number % 1)


def is_flag(value: object) -> bool:
    """Whether this is one yes or no, numpy's and torch's too; 0 and 1 count."""
    return is_number(value, 0) and value in (False, True)


def plain_number(value: Any) -> Any:
    """A number of numpy or torch as one of Python; anything else as it is.

    >>> import numpy
    >>> plain_number(numpy.int64(3)), plain_number("3")
    (3, '3')
    """
    try:
        return value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # several numbers
        return value


def outline(value: object) -> str:
    """What somebody passed, in one short line."""
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."


def complain(text: str) -> None:
    """One line on standard error, whatever the lines of the text."""
    # a line that ends without a full stop is joined by a semicolon, every other one by a space
    joined = re.sub(r"(?<=\w)\n\s*", "; ", text.strip())
    one_line = re.sub(r"\n\s*", " ", joined)
    print("esper:", printable(one_line), file=sys.stderr)


class EsperError(Exception):
    """Raised as one of its subclasses for every mistake that a caller can make.

    The message says what was wrong, the rule, and the way out; the command line prints it and ends
    with exit code 2. Catch it around a call whose input comes from a user:

    >>> import esper
    >>> try:
    ...     esper.StageLengths(ramp=-1)
    ... except esper.EsperError as problem:
    ...     print(problem)
    StageLengths.ramp must be a whole number of at least 0, got -1.
    """


class UnknownNameError(EsperError, LookupError):
    """Raised when a name is in no registry.

    Use the nearest known name, which the message offers, or register your own first.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str], advice: str = ""):
        known = sorted(known)
        close = get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listing = ", ".join(known) or "none"
        ending = f" {advice}" if advice else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {listing}.{ending}")


class NameTakenError(EsperError, ValueError):
    """Raised when a registry already has this name.

    Choose another name, or pass `replace=True`.
    """


class SlotIdError(EsperError, ValueError):
    """Raised when a slot id is not r<row>c<column>, or a set of ids is empty or repeats one.

    Write ids such as "r0c0", each one once.
    """


class IllegalTransitionError(EsperError, ValueError):
    """Raised when a slot is moved to a stage that the lifecycle's table does not allow.

    Move only along `TRANSITIONS`; the message lists the stages that can follow.
    """


class SettingError(EsperError, ValueError):
    """Raised when a setting is outside its range, or two settings contradict each other.

    Change the setting that the message names.
    """


class MissingExtraError(EsperError, ImportError):
    """Raised when a package is not installed that only a part of Esper needs.

    Install the extra that the message names.
    """


class NotCompiledError(SettingError):
    """Raised when a captured graph needs a kernel that is not compiled yet.

    Run the step once before the capture, or use the eager executor.
    """


class IllegalActionError(EsperError, ValueError):
    """Raised when an action cannot be applied now; nothing has changed.

    Ask the masks first, or catch this error and wait.
    """


class SlotOccupiedError(IllegalActionError):
    """Raised when a seed is to germinate in a slot that is not DORMANT.

    Wait until the slot is DORMANT, or choose another one.
    """


class NoLiveSeedError(IllegalActionError):
    """Raised when a seed is to be culled or fossilized in a slot that holds none.

    Germinate a seed there first.
    """


class SeedTooYoungError(IllegalActionError):
    """Raised when a seed is to be culled before it has trained its first epochs.

    Train an epoch first.
    """


class NotMeasuredError(IllegalActionError):
    """Raised when a seed is to be fossilized off probation or without a measured contribution.

    Train it to probation and measure it first.
    """


class BudgetExceededError(IllegalActionError):
    """Raised when a seed would lift the network above its budget of parameters or of FLOPs.

    Choose a smaller blueprint, cull a seed, or raise the budget.
    """


class SeedLimitError(IllegalActionError):
    """Raised when one seed more than `max_seeds` is to be planted.

    Cull a seed, or raise `max_seeds`.
    """


class BlueprintMismatchError(IllegalActionError):
    """Raised when a blueprint's modules cannot work on the features of the slot.

    Choose one of the blueprints that the message lists.
    """


class RepeatedBlendError(IllegalActionError):
    """Raised when a blend would raise a seed exactly as another blend of the run does.

    Choose the blend that the message names, or a longer ramp.
    """


class EpisodeOverError(EsperError, RuntimeError):
    """Raised when an environment is asked for a step outside of an episode.

    Call `reset` first: it begins the next one.
    """


class HostError(EsperError, ValueError):
    """Raised when a host lacks a named sub-module, or has features that no seed can read.

    Name other modules as slots, or change the host as the message says.
    """


class BlueprintError(EsperError, ValueError):
    """Raised when a registered blueprint breaks a promise that every seed makes.

    Correct the blueprint; the message names the promise.
    """


class OptimizerError(EsperError, ValueError):
    """Raised when an optimiser or scheduler cannot follow a growing network.

    Use one that the message names, or create the scheduler after `attach`.
    """


class MeasurementError(EsperError, ValueError):
    """Raised when held-out values are no evidence: a scalar, NaN, or unpaired.

    Return one finite loss per held-out example, in the same order every time.
    """


class DataError(EsperError, ValueError):
    """Raised when a data set is missing, truncated or not what it claims to be.

    Fetch it again, or correct the examples that the message names.
    """


class DeviceError(EsperError, ValueError):
    """Raised when a device is missing, not supported, or out of memory.

    Name another device, or lower the batch or the number of hosts.
    """


class SaveError(EsperError, ValueError):
    """Raised when a save or a run folder is incomplete, altered, or belongs to something else.

    Restore it from a copy, or use another save or folder.
    """


class MaskError(EsperError, ValueError):
    """Raised when a choice has nothing that is possible, or its mask has the wrong shape.

    Pass masks made for the same slots and blueprints; each needs one legal choice.
    """


class CheckpointMismatchError(EsperError, RuntimeError):
    """Raised when a checkpoint has weights for other slots, blueprints or observations.

    Use a checkpoint that was trained for the same ones, or train a new policy.
    """


class EnvironmentMismatchError(EsperError, ValueError):
    """Raised when an environment has spaces or behaviour that the learner does not know.

    Wrap it so that it has spaces the message names.
    """
