"""Faults to plant in a copy of the sources, each with the test that must catch it.

They are of three kinds that no other check would notice: learning, several ranks, storage; and the
few mistakes that would make a comparison unfair. See test_planted_faults.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake: `old` becomes `new` in one function, and `test` has to fail."""

    phrase: str
    place: str
    """file and function, as tamiyo/actor_critic.py::ActorCritic.get_action; or a file alone"""
    old: str
    """code that stands there once, compared as syntax: see planting.py"""
    new: str
    test: str

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    @property
    def function(self) -> str:
        return self.place.partition("::")[2]
