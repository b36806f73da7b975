"""What a garden gives out: the grown network, an export of it, and controls to compare it with."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from esper.garden import hints, processes
from esper.garden.books import Books
from esper.garden.controls import Like, build_control
from esper.garden.undoing import refuse_broken
from esper.kasmina.exporting import export_network
from esper.kasmina.harvesting import harvest
from esper.kasmina.model import MorphogeneticModel
from esper.telemetry.events import Event, LedgerClosed

if TYPE_CHECKING:
    from esper.garden.garden import Garden


class TakingHome(ABC):
    """The part of a garden that hands networks out; the garden stays as it is."""

    model: MorphogeneticModel
    epoch: int
    history: list[Event]
    books: Books

    def harvest(self) -> nn.Module:
        """The grown network as a plain module of the host's class, without live seeds.

        Its cost ends the history.
        """
        self._hint_of_harvest()
        with torch.inference_mode(mode=False):
            plain = harvest(self.model)
        self.history = [event for event in self.history if not isinstance(event, LedgerClosed)]
        self._emit([self.books.close(seed=self.model.settings.seed)])
        return plain

    def export(self, folder: str | Path) -> Path:
        """Write the harvested weights and a source file that rebuilds the network without esper.

        Of several processes the first one writes.
        """
        self._hint_of_harvest()
        if not processes.is_first():
            return Path(folder)
        return export_network(self.model, Path(folder))

    @torch.inference_mode(mode=False)
    def control(
        self,
        like: Like = "grown",
        *,
        build: Callable[[], nn.Module] | None = None,
        seed: int = 0,
    ) -> nn.Module:
        """A plain network to train in the same loop, to see what growing itself was worth.

        Args:
            like: "grown" is the structure that a harvest has now, with fresh weights: would a
                network of this size have done as well from the start? "start" is the model as
                `esper.grow` found it: what would it have learnt alone?
            build: returns a fresh host, for models whose weights cannot be drawn again.
            seed: fresh weights are drawn from it; the global random state stays as it is.

        Raises:
            HostError: weights cannot be drawn again without `build`, or the start was not kept.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> import esper
            >>> host = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
            >>> garden = esper.grow(host, slots="0", example=torch.zeros(3, 4), policy="never")
            >>> control = garden.control()
            >>> control[0].weight.shape == host[0].weight.shape
            True
            >>> torch.equal(control[0].weight, host[0].weight)
            False
            >>> torch.equal(garden.control(like="start")[0].weight, host[0].weight)
            True
        """
        refuse_broken(cast("Garden", self))
        return build_control(cast("Garden", self), like, build, seed)

    def _hint_of_harvest(self) -> None:
        """Say once what is not taken home, and what is taken home without having been judged."""
        refuse_broken(cast("Garden", self))
        said = hints.hint_of_left_out(self.model, self.epoch)
        said += hints.hint_of_unjudged(self.model, self.history, self.epoch)
        self._emit([hint for hint in said if hint not in self.history])

    @abstractmethod
    def _emit(self, happened: Sequence[Event]) -> list[Event]:
        """Keep events, and record them."""
