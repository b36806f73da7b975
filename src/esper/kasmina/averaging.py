"""An average of the weights that follows growth, for whoever evaluates or ships averaged weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import SettingError


class Average:
    """An exponential moving average of every parameter of a growing network.

    A seed's average begins when it is planted, stays with it when it is kept, and goes when it goes. Buffers are not
    averaged. Evidence is always about the weights themselves.
    """

    def __init__(self, model: MorphogeneticModel, decay: float):
        if not 0.0 < decay < 1.0:
            raise SettingError(f"decay must lie between 0 and 1, got {decay!r}; 0.999 averages about 1,000 steps.")
        self.model, self.decay = model, decay
        self._values: dict[nn.Parameter, Tensor] = {}
        self.update()

    def update(self) -> None:
        """Move towards the weights as they are; the garden does so after each step of the optimiser."""
        fresh = {}
        for parameter in self.model.parameters():
            # half precision would lose small steps, and the average would silently stand still
            now = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
            before = self._values.get(parameter)
            fresh[parameter] = now.clone() if before is None else before.to(now).lerp_(now, 1.0 - self.decay)
        self._values = fresh

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network with its averaged weights, to evaluate, harvest or export. Save outside of it."""
        kept = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        try:
            for parameter, value in kept:
                parameter.detach().copy_(self._values.get(parameter, value))
            yield
        finally:
            for parameter, value in kept:
                parameter.detach().copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name; what was planted after the last step has none yet."""
        return {name: self._values[p].contiguous() for name, p in self.model.named_parameters() if p in self._values}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._values = {p: tensors[name].to(p.device) for name, p in self.model.named_parameters() if name in tensors}
