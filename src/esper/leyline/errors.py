"""Every error a caller can cause, and how it is told. Each says what it got, the rule, and the way out."""

import math
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import SupportsFloat

CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


def printable(text: str) -> str:
    """Text from a file, a folder's name or a user, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def is_number(value: object, least: float = -math.inf, *, is_whole: bool = False) -> bool:
    """Whether this is one finite number, numpy's and torch's too, and at least `least`."""
    number = float(value) if isinstance(value, SupportsFloat) else math.nan
    return least <= number < math.inf and not (is_whole and number % 1)


def complain(text: str) -> None:
    """One line on standard error, whatever the lines of the text."""
    print(
        "esper:",
        printable(re.sub(r"\n\s*", " ", re.sub(r"(?<=\w)\n\s*", "; ", text.strip()))),
        file=sys.stderr,
    )


class EsperError(Exception):
    """Base of all errors that mean "the input is wrong"; the command line turns it into exit code 2."""


class UnknownNameError(EsperError, LookupError):
    """A name that no registry knows; the message offers the nearest one."""

    def __init__(self, kind: str, name: object, known: Iterable[str], advice: str = ""):
        known = sorted(known)
        close = get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listing = ", ".join(known) or "none"
        super().__init__(
            f"unknown {kind} {name!r}.{hint} Known: {listing}.{' ' + advice if advice else ''}"
        )


class NameTakenError(
    EsperError, ValueError
): ...  # a registry has this name, and nobody said to replace it


class SlotIdError(
    EsperError, ValueError
): ...  # not r<row>c<column>, or a set of ids that is empty or repeats one


class IllegalTransitionError(
    EsperError, ValueError
): ...  # a move that the lifecycle's table does not have


class SettingError(
    EsperError, ValueError
): ...  # a setting outside its range, or two that contradict each other


class NotCompiledError(
    SettingError
): ...  # something is yet to be compiled where nothing can be: in a captured graph


class IllegalActionError(
    EsperError, ValueError
): ...  # a refusal: it cannot be applied now, and nothing has changed


class SlotOccupiedError(IllegalActionError): ...  # germinating where the slot is not DORMANT


class NoLiveSeedError(
    IllegalActionError
): ...  # culling or fossilizing where there is no seed to act on


class SeedTooYoungError(
    IllegalActionError
): ...  # culling a seed before it has trained its first epochs


class NotMeasuredError(
    IllegalActionError
): ...  # fossilizing off probation or without a measured contribution


class BudgetExceededError(
    IllegalActionError
): ...  # a seed that would lift the network above its parameter budget


class SeedLimitError(IllegalActionError): ...  # one seed more than `max_seeds`


class BlueprintMismatchError(
    IllegalActionError
): ...  # a blueprint whose modules cannot work on the slot's features


class HostError(
    EsperError, ValueError
): ...  # a host without a named sub-module, or with features no seed can read


class BlueprintError(
    EsperError, ValueError
): ...  # a registered blueprint that breaks the promises every seed makes


class OptimizerError(
    EsperError, ValueError
): ...  # an optimiser or scheduler that cannot follow a growing network


class MeasurementError(
    EsperError, ValueError
): ...  # held-out values that are no evidence: a scalar, NaN, or unpaired


class DataError(
    EsperError, ValueError
): ...  # a data set that is missing, truncated or not what it claims to be


class DeviceError(
    EsperError, ValueError
): ...  # a device that is not there, not supported, or out of memory


class SaveError(
    EsperError, ValueError
): ...  # a saved garden that is incomplete, altered, or belongs to another model


class MaskError(
    EsperError, ValueError
): ...  # a choice for which nothing is possible, or a mask of the wrong shape


class CheckpointMismatchError(
    EsperError, RuntimeError
): ...  # weights for other slots, blueprints or observations


class EnvironmentMismatchError(
    EsperError, ValueError
): ...  # its spaces or ways are unknown to the learner
