"""The average of a growing network's weights. The garden calls it around every optimiser step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import SettingError, is_number


class Average:
    """An exponential moving average of every parameter of a growing network.

    A seed's average begins when it is planted, stays with it when it is kept, and goes when it
    goes. Buffers are not averaged. Evidence is always measured on the current weights, never on
    the average.

    `is_applied` is whether the network holds its averaged weights now; see `applied`.
    """

    def __init__(self, model: MorphogeneticModel, decay: float):
        if not is_number(decay) or not 0.0 < decay < 1.0:
            raise SettingError(
                f"decay must lie between 0 and 1, got {decay!r}; 0.999 averages about 1,000 steps."
            )
        self.model = model
        self.decay = float(decay)
        self.is_applied = False
        self._values: dict[nn.Parameter, Tensor] = {}
        # the optimisers that have stepped since the last update
        self._moved: set[torch.optim.Optimizer] = set()
        self.update()
        self._is_new = True

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the weights as they are before an optimiser's step, where they may be new.

        Before the first step they may still have changed: DDP makes those of all processes equal.
        An optimiser that steps a second time starts an update without the others, which step less
        often.
        """
        self.refuse_applied()
        if self._is_new:
            self._values = {}
        if self._is_new or optimizer in self._moved:
            self.update()

    def end_step(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """Update the average once all `count` optimisers have made their step."""
        self._moved.add(optimizer)
        if len(self._moved) == count:
            self.update()

    def update(self) -> None:
        """Move towards the current weights; the garden does so after each optimiser step."""
        self._is_new = False
        self._moved.clear()
        averages: dict[nn.Parameter, Tensor] = {}
        for parameter in self.model.parameters():
            # half precision would lose small steps, and the average would silently stand still
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            now = parameter.detach().to(dtype)
            before = self._values.get(parameter)
            if before is None:
                averages[parameter] = now.clone()
            else:
                averages[parameter] = before.to(now).lerp_(now, 1.0 - self.decay)
        self._values = averages

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the network its averaged weights inside a `with` block.

        Evaluate, harvest or export there; to train, step, save or restore is refused meanwhile.
        """
        weights = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        was_applied = self.is_applied
        self.is_applied = True
        try:
            for parameter, value in weights:
                parameter.detach().copy_(self._values.get(parameter, value))
            yield
        finally:
            self.is_applied = was_applied
            for parameter, value in weights:
                parameter.detach().copy_(value)

    def refuse_applied(self) -> None:
        """Refuse to take averaged weights for the weights themselves."""
        if self.is_applied:
            raise SettingError(
                "inside ema.applied() the weights are averages: train, step, save and restore "
                "after it."
            )

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name; what was planted after the last step has none yet."""
        averages: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter in self._values:
                averages[name] = self._values[parameter].contiguous()
        return averages

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over saved averages; a parameter without one begins with its weights."""
        averages: dict[nn.Parameter, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name in tensors:
                averages[parameter] = tensors[name].to(parameter.device)
        self._values = averages
        self._is_new = False
