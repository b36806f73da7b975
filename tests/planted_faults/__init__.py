"""Faults to plant in a copy of the sources, each with the test that must catch it (see
test_planted_faults).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One textual mistake: `old` becomes `new` in `file`, and `test` has to fail."""

    phrase: str
    file: str
    old: str
    new: str
    test: str
