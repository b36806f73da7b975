"""How many layers a network should have when so much compute is spent. Plain numbers."""

from collections.abc import Mapping


def depth_at(share: float, to: int) -> int:
    """The layers of a network that ends with `to`, at a share of its compute.

    The law: depth grows as the cube root of compute. The result is the nearest whole number, at
    least 1, so the last layer comes at `((to - 0.5) / to) ** 3` of the compute (82 % for 8 layers).

    It rests on one prototype: GPTs of width 96, 256 and 512 under Muon, copies of the last layer,
    one at a time, close to `8 * compute ** (1 / 3)`. They lay below the best fixed depth at most
    budgets. Plans that grow earlier did as well there, so nothing says that this law is the best;
    it has not been compared with others.

    Example:
        >>> [depth_at(share, 8) for share in (0.0, 0.05, 0.125, 0.25, 0.5, 1.0)]
        [1, 3, 4, 5, 6, 8]
    """
    return max(1, int(to * share ** (1 / 3) + 0.5))


def compute_shares(start: int, to: int) -> dict[int, float]:
    """For each depth above `start` the share of the compute at which the law reaches it.

    Example:
        >>> {depth: round(share, 3) for depth, share in compute_shares(2, 4).items()}
        {3: 0.244, 4: 0.67}
    """
    return {depth: ((depth - 0.5) / to) ** 3 for depth in range(start + 1, to + 1)}


def token_shares(start: int, to: int, layer: float, rest: float) -> dict[int, float]:
    """For each depth above `start` the share of the tokens at which the law reaches it.

    A token costs `rest` and, for each layer that it goes through, `layer`: FLOPs, or the parameters
    that multiply. So a share of tokens buys little compute while the network is shallow.

    Example:
        >>> {depth: round(share, 3) for depth, share in token_shares(2, 4, 1.0, 0.0).items()}
        {3: 0.352, 4: 0.762}
    """
    compute = compute_shares(start, to)
    begins = [0.0, *compute.values()]
    ends = [*compute.values(), 1.0]
    tokens = [
        (end - begin) / (rest + (start + number) * layer)
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    shares: dict[int, float] = {}
    spent = 0.0
    for depth, used in zip(compute, tokens, strict=False):
        spent += used
        shares[depth] = spent / sum(tokens)
    return shares


def depth_of(tokens: float, total: float, start: int, shares: Mapping[int, float]) -> int:
    """The depth that a plan of token shares has when so many tokens are seen.

    Example:
        >>> [depth_of(tokens, 100, 2, {3: 0.3, 4: 0.6}) for tokens in (29, 30, 100)]
        [2, 3, 4]
    """
    reached = [depth for depth, share in shares.items() if tokens >= share * total]
    return max(reached, default=start)
