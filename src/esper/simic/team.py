"""The processes that train one policy together.

One process is a team of one: its sums and gathers are what it has.
"""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from esper.leyline.errors import DeviceError, EsperError, SettingError, complain

_JOINING, _MEETING, _PATIENCE = timedelta(minutes=5), timedelta(minutes=1), timedelta(minutes=30)
"""Longest waits:

for the address, for a connection of two ranks, for a rank that is alive (a long epoch, twins).
"""
_BEAT, _SILENCE = timedelta(seconds=1), timedelta(seconds=60)
"""How often ranks hear of each other, and how long one may be silent before it counts as lost."""


class Team:
    """Every method is called by all ranks at the same point; each returns the same on all of
    them.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
        shares_gpu: bool = False,
    ):
        self.rank, self.size, self.device, self.shares_gpu = (
            rank,
            size,
            torch.device(device),
            shares_gpu,
        )
        self._told: EsperError | None = None

    def assign(self, total: int) -> list[range]:
        """The hosts of each rank: stretches of 0 .. total - 1 that differ by one host at most."""
        if total < self.size:
            raise SettingError(
                f"{total} hosts are too few for {self.size} ranks; start fewer ranks "
                f"or raise --hosts."
            )
        each, more = divmod(total, self.size)
        return [
            range(*pair)
            for pair in pairwise(rank * each + min(rank, more) for rank in range(self.size + 1))
        ]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks; the argument is left alone.

        Where some share a GPU, the CPU makes it.
        """
        if self.size == 1:
            return values
        total = values.detach().to("cpu" if self.shares_gpu else values.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], number: Tensor) -> Tensor:
        """Every gradient becomes its sum over ranks; a rank without one adds zero.

        Returns the sum of `number` too.
        """
        if self.size == 1:
            return number
        own = list(parameters)
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own]
        *parts, total = self.sum(torch.cat([*flat, number.to(flat[0])[None]])).split(
            [*(p.numel() for p in own), 1]
        )
        for parameter, part in zip(own, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        return total[0]

    def any(self, claim: bool) -> bool:
        return self.ask(claim)()

    def ask(self, claim: bool) -> Callable[[], bool]:
        """As `any`, but nobody waits before the answer is read, which all do at the same point and
        before they end.
        """
        if self.size == 1:
            return lambda: claim
        claims = torch.tensor(int(claim))
        work: Any = dist.all_reduce(claims, async_op=True)
        return lambda: work.wait() and bool(claims)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order; plain data."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """A mistake of one rank is everybody's:

        all of them raise it, and nobody is left waiting.
        """
        problem: EsperError | None = None
        try:
            yield
        except EsperError as found:
            if (
                found is self._told
            ):  # by a block inside this one, which a rank that failed before it does not enter
                raise
            problem = found
        texts = self.gather(None if problem is None else str(problem))
        if said := [(rank, text) for rank, text in enumerate(texts) if text is not None]:
            self._told = problem or SettingError(f"rank {said[0][0]} failed: {said[0][1]}")
            raise self._told

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse to start where ranks were started with different facts."""
        everyone = self.gather(dict(facts))
        for rank, other in enumerate(everyone):
            for name in (*everyone[0], *other):
                if (here := other.get(name)) != (first := everyone[0].get(name)):
                    found = (
                        f"ranks disagree on {name}: rank 0 has {first!r}, rank {rank} has {here!r}"
                    )
                    raise SettingError(
                        f"{found}. Start all of them with the same command, version and files."
                    )


def code_digest() -> str:
    """Changes with any line of this package."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def is_launched() -> bool:
    """Whether torchrun, or somebody who sets what it sets, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def was_restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def joined_team(wants_cuda: bool) -> Iterator[Team]:
    """The team that this process was started for; alone where nobody started a team.

    It ends for all ranks together.
    """
    if not is_launched():
        yield Team()
        return
    device = _own_device() if wants_cuda else torch.device("cpu")
    try:
        store, rank, size = next(rendezvous("env://", timeout=_JOINING))
        fresh = _met(store, rank, size)
        is_shared = wants_cuda and _is_shared(fresh, rank, size, device)
        backend = "cpu:gloo,cuda:nccl" if wants_cuda and not is_shared else "gloo"
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=_MEETING)
        _set_pg_timeout(_PATIENCE)
        pulse = Pulse(rank, size)
    except (RuntimeError, ValueError, OSError) as problem:
        where = f"{os.environ.get('MASTER_ADDR', 'unset')}:{os.environ.get('MASTER_PORT', 'unset')}"
        raise DeviceError(
            f"rank {os.environ['RANK']} cannot join the others at {where} "
            f"({str(problem).splitlines()[0]}). Give all "
            "the same --master-addr or --rdzv-endpoint, in reach of all, with a free "
            "port; where there are several "
            "networks, name the one: GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0."
        ) from problem
    ended: BaseException | None = None
    try:
        yield Team(rank, size, device, is_shared)
    except BaseException as problem:
        ended = problem
    pulse.end(ended)
    dist.destroy_process_group()
    if pulse.heard and (
        ended is None or (isinstance(ended, RuntimeError) and not isinstance(ended, EsperError))
    ):
        raise DeviceError(pulse.heard) from ended
    if ended is not None:
        raise ended


def _own_device() -> torch.device:
    """This rank's GPU; where there are more ranks than GPUs, they take turns."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceError(
            "the configuration asks for CUDA, but this machine has no GPU; --set "
            "devices='[\"cpu\"]'."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.cuda.set_device(device)
    return device


def _is_shared(store: Store, rank: int, size: int, device: torch.device) -> bool:
    """Whether two ranks have one GPU, which NCCL refuses; all ranks get the same answer."""
    store.set(
        f"gpu/{rank}", f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    )
    return len({store.get(f"gpu/{other}") for other in range(size)}) < size


class Pulse:
    """A thread that meets all other ranks each second, whatever its own rank does: who stays away
    is lost.

    A timeout cannot do this: the wait for a rank that trains a long epoch looks like the wait for
    one that is cut off.
    """

    def __init__(self, rank: int, size: int):
        self.heard = ""  # what became of another rank; empty while nothing has
        self._rank, self._size, self._other = rank, size, 0  # the other is whom it waits for
        self._own: str | None = None  # None while it works, empty when it has ended well
        self._is_over = threading.Event()
        self._group = dist.new_group(backend="gloo", timeout=_SILENCE)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def end(self, problem: BaseException | None) -> None:
        """Tell the others how this rank has ended; comes back when all have, or when one has
        failed.
        """
        name = "" if isinstance(problem, EsperError) else f"{type(problem).__name__}: "
        self._own = "" if problem is None else f"{name}{problem}"
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        words: list[str | None] = [None]
        try:
            while None in words and not any(words):
                self._is_over.wait(_BEAT.total_seconds())
                words = self._meet()
            failed = [
                f"rank {rank} failed: {word}"
                for rank, word in enumerate(words)
                if word and rank != self._rank
            ]
            self.heard = "; ".join(failed)
        except RuntimeError:
            self.heard = (
                f"rank {self._rank} lost contact with rank {self._other}. A process, "
                f"a machine or the network is down; "
                "when all are back, go on with the same command and --resume."
            )
        if self.heard and not self._is_over.wait(
            5 * _BEAT.total_seconds()
        ):  # it trains, or waits on a GPU
            complain(self.heard)
            os._exit(2)

    def _meet(self) -> list[str | None]:
        """Every rank's word, by way of rank 0:

        one at a time, so that it is known who does not answer.
        """
        words, others = [self._own] * self._size, range(1, self._size)
        if self._rank > 0:
            dist.send_object_list([self._own], 0, self._group)
            dist.recv_object_list(words, 0, self._group)
            return words
        for self._other in others:
            word: list[str | None] = [None]
            dist.recv_object_list(word, self._other, self._group)
            words[self._other] = word[0]
        for self._other in others:
            dist.send_object_list(words, self._other, self._group)
        return words


def _met(store: Store, rank: int, size: int) -> Store:
    """The store under a name of this start's own: torchrun keeps it over restarts, and what dead
    ranks wrote is there.

    A rank asks by a name that nobody else has; only a running rank 0 can answer it.
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
