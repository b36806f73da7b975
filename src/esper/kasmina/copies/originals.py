"""Which parameter of the host each parameter of a copy comes from."""

from torch import nn

from esper.kasmina.copies.copying import Copy


def pair_originals(seed: nn.Module | None, source: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Parameters of a copy, each with the one of `source` whose optimiser settings it inherits.

    Empty for a seed that is no copy. A copy's gate has no original.
    """
    if not isinstance(seed, Copy):
        return {}
    originals = dict(source.named_parameters(remove_duplicate=False))
    pairs: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in seed.body.named_parameters():
        if name in originals:
            pairs[parameter] = originals[name]
    return pairs
