"""What tests of several packages ask in the same words."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

from esper.leyline.legality import refuse


def with_slow(cases: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """The cases, those of `slow` marked, so that only `make slow` runs them."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


def is_legal(action, view):
    """Whether an action can be carried out now."""
    words = (action.op, action.slot_id, action.blueprint_id, action.blend_algorithm_id)
    return refuse(*words, view) is None
