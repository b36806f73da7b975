"""Every error a caller can cause. Each says what it got, the rule, and the way out; all share one base."""

from collections.abc import Iterable
from difflib import get_close_matches


class EsperError(Exception):
    """Base of all errors that mean "the input is wrong"; the command line turns it into exit code 2."""


class UnknownNameError(EsperError, LookupError):
    """A name that no registry knows; the message offers the nearest one."""

    def __init__(self, kind: str, name: object, known: Iterable[str], advice: str = ""):
        known = sorted(known)
        close = get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listing = ", ".join(known) or "none"
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {listing}.{' ' + advice if advice else ''}")


class SlotIdError(EsperError, ValueError):
    """A slot id that is not of the form r{row}c{column}, or a set of ids that is empty or repeats one."""


class IllegalTransitionError(EsperError, ValueError):
    """A move that the lifecycle's table does not have."""


class SettingError(EsperError, ValueError):
    """A setting outside its range, or two that contradict each other."""


class IllegalActionError(EsperError, ValueError):
    """Base of the refusals: the action cannot be applied now, and nothing has changed."""


class SlotOccupiedError(IllegalActionError):
    """Germinating where the slot is not DORMANT."""


class NoLiveSeedError(IllegalActionError):
    """Culling or fossilizing where there is no seed to act on."""


class SeedTooYoungError(IllegalActionError):
    """Culling a seed before it has lived its first epochs."""


class NotMeasuredError(IllegalActionError):
    """Fossilizing a seed that is not on probation or has no measured contribution."""


class BudgetExceededError(IllegalActionError):
    """A seed that would lift the network above its parameter budget."""


class SeedLimitError(IllegalActionError):
    """One seed more than `max_seeds`."""


class BlueprintMismatchError(IllegalActionError):
    """A blueprint whose modules cannot work on the slot's features."""


class HostError(EsperError, ValueError):
    """A host that cannot be wrapped: a missing sub-module, or features that no seed can read."""


class BlueprintError(EsperError, ValueError):
    """A registered blueprint that breaks the promises every seed makes."""


class OptimizerError(EsperError, ValueError):
    """An optimiser or scheduler that cannot follow a growing network."""


class MeasurementError(EsperError, ValueError):
    """Held-out values that are no evidence: a scalar, NaN, or examples that do not pair up."""


class DataError(EsperError, ValueError):
    """A data set that is missing, truncated or not what it claims to be."""


class DeviceError(EsperError, ValueError):
    """A device that is not there, not supported, or out of memory."""


class SaveError(EsperError, ValueError):
    """A saved garden that is incomplete, altered, or belongs to another model."""


class MaskError(EsperError, ValueError):
    """A choice for which nothing is possible, or a mask of the wrong shape."""


class CheckpointMismatchError(EsperError, RuntimeError):
    """Weights of a policy that was built for other slots, blueprints or observations."""


class EnvironmentMismatchError(EsperError, ValueError):
    """An environment whose spaces or ways the learner does not know."""
