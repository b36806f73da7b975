"""The processes that train one policy together. One process is a team of one: its sums and gathers are what it has."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from esper.leyline.errors import DeviceError, EsperError, SettingError

_PATIENCE = timedelta(minutes=30)
"""Longest wait of one rank for another: the first epoch of a large host, twins."""
_JOINING = timedelta(minutes=5)
"""Longest wait for the address at which ranks meet."""


class Team:
    """Every method is called by all ranks at the same point; each returns the same on all of them."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu"):
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._told: EsperError | None = None

    def share(self, total: int) -> range:
        """The members of 0 .. total - 1 that belong to this rank: a stretch, as long as the others' to one."""
        if total < self.size:
            raise SettingError(f"{total} hosts cannot be dealt to {self.size} ranks; start fewer, or raise --hosts.")
        least, more = divmod(total, self.size)
        first = self.rank * least + min(self.rank, more)
        return range(first, first + least + (self.rank < more))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks; the argument is left alone."""
        if self.size == 1:
            return values
        total = values.detach().to(self.device).clone()
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes its sum over ranks; a rank without one adds zero."""
        if self.size == 1:
            return
        own = list(parameters)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own])
        dist.all_reduce(flat)
        for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def any(self, claim: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.sum(torch.tensor(int(claim))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order; plain data."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """A mistake of one rank is everybody's: all of them raise it, and nobody is left waiting."""
        problem: EsperError | None = None
        try:
            yield
        except EsperError as found:
            if found is self._told:  # by a block inside this one, which a rank that failed before it does not enter
                raise
            problem = found
        texts = self.gather(None if problem is None else str(problem))
        said = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if said:
            self._told = problem or SettingError(f"rank {said[0][0]} could not go on: {said[0][1]}")
            raise self._told

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse to start where ranks were started with different facts."""
        everyone = self.gather(dict(facts))
        for rank, other in enumerate(everyone):
            for name, value in everyone[0].items():
                if other.get(name) != value:
                    raise SettingError(
                        f"ranks disagree on {name}: rank 0 has {value!r}, rank {rank} has {other.get(name)!r}. "
                        "Start all of them with the same command, version and files."
                    )


def code_digest() -> str:
    """Changes with any line of this package."""
    root = Path(__file__).parents[1]
    text = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def is_launched() -> bool:
    """Whether torchrun, or somebody who sets what it sets, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def was_restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def joined_team(wants_cuda: bool) -> Iterator[Team]:
    """The team that this process was started for; alone where nobody started a team."""
    if not is_launched():
        yield Team()
        return
    device = torch.device("cpu")
    if wants_cuda:
        place = int(os.environ.get("LOCAL_RANK", "0"))
        if not torch.cuda.is_available() or place >= torch.cuda.device_count():
            raise DeviceError(f"local rank {place} needs a GPU of its own, but there are {torch.cuda.device_count()}.")
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    try:
        store, rank, size = next(rendezvous("env://", timeout=_JOINING))
        backend, fresh = "nccl" if wants_cuda else "gloo", _met(store, rank, size)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=_PATIENCE)
    except (RuntimeError, ValueError, OSError) as problem:
        where = f"{os.environ.get('MASTER_ADDR', 'unset')}:{os.environ.get('MASTER_PORT', 'unset')}"
        raise DeviceError(
            f"rank {os.environ['RANK']} cannot join the others at {where} ({str(problem).splitlines()[0]}). Give all "
            "ranks the same torchrun --master-addr or --rdzv-endpoint, an address that they can reach, and a free port."
        ) from problem
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def _met(store: Store, rank: int, size: int) -> Store:
    """The store under a name of this start's own: torchrun keeps it over restarts, and what dead ranks wrote is there.

    A rank asks by a name that nobody else has; only a rank 0 that lives can answer it.
    """
    own = uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", own)
        start = store.get(f"answer/{own}").decode()
        store.set(f"{start}/{rank}", "")
        return PrefixStore(start, store)
    until = time.monotonic() + _JOINING.total_seconds()
    while missing := [other for other in range(1, size) if not store.check([f"{own}/{other}"])]:
        if time.monotonic() > until:
            raise RuntimeError(f"rank {missing[0]} did not come")
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        time.sleep(0.02)
    return PrefixStore(own, store)


def plain_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values by dotted name, so that a difference can be named."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": found for inner, found in plain_facts(value).items()}
        else:
            flat[name] = json.loads(json.dumps(value, default=str))
    return flat
