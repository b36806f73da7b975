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
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from esper.leyline.errors import DeviceError, EsperError, SettingError, complain

_JOINING = timedelta(minutes=5)
"""longest wait for the address of rank 0 and for all ranks to come there"""
_MEETING = timedelta(minutes=1)
"""longest wait for the connection of two ranks"""
_PATIENCE = timedelta(minutes=30)
"""longest wait for a rank that is alive: it may train a long epoch or play twins"""
_BEAT = timedelta(seconds=1)
"""how often ranks hear of each other"""
_SILENCE = timedelta(seconds=60)
"""how long a rank may be silent before it counts as lost"""
_VOTE_SECONDS = 2.0
"""how often ranks vote on stopping, about: an answer that is read with the next vote stops all
ranks within twice this"""


class Team:
    """The ranks that train one policy, seen from one of them.

    All ranks call a method at the same point of their work. It returns the same on all of them.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
        shares_gpu: bool = False,
    ):
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.shares_gpu = shares_gpu
        self._raised_by_all: EsperError | None = None

    def assign(self, total: int) -> list[range]:
        """The hosts of each rank: stretches of 0 .. total - 1 that differ by one host at most."""
        if total < self.size:
            raise SettingError(
                f"{total} hosts are too few for {self.size} ranks; start fewer ranks "
                f"or raise --hosts."
            )
        fewest, ranks_with_one_more = divmod(total, self.size)
        shares = []
        start = 0
        for rank in range(self.size):
            count = fewest + (1 if rank < ranks_with_one_more else 0)
            shares.append(range(start, start + count))
            start += count
        return shares

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks; the argument stays as it is.

        Where ranks share a GPU, the CPU adds.
        """
        if self.size == 1:
            return values
        total = values.detach().to("cpu" if self.shares_gpu else values.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], number: Tensor) -> Tensor:
        """Replace every gradient by its sum over ranks; a rank without one adds zero.

        Returns the sum of `number`, which travels in the same message.
        """
        if self.size == 1:
            return number
        parameters = list(parameters)
        flat = []
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            flat.append(gradient.flatten())
        message = torch.cat([*flat, number.to(flat[0])[None]])
        lengths = [parameter.numel() for parameter in parameters]
        *parts, total = self.sum(message).split([*lengths, 1])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        return total[0]

    def any(self, claim: bool) -> bool:
        """Whether the claim is true on any rank."""
        return self.ask(claim)()

    def ask(self, claim: bool) -> Callable[[], bool]:
        """As `any`, but a rank waits only when it calls the function that is returned.

        All ranks call it at the same point, and before they end.
        """
        if self.size == 1:
            return lambda: claim
        claims = torch.tensor(int(claim))
        work: Any = dist.all_reduce(claims, async_op=True)
        return lambda: work.wait() and bool(claims)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; values are plain data."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block whose failure on one rank is raised on all, so that no rank waits for ever."""
        problem: EsperError | None = None
        try:
            yield
        except EsperError as caught:
            # An inner block has raised it on all ranks already. A rank that failed before the
            # inner block does not enter it and meets the others there.
            if caught is self._raised_by_all:
                raise
            problem = caught
        texts = self.gather(None if problem is None else str(problem))
        for rank, text in enumerate(texts):
            if text is not None:
                self._raised_by_all = problem or SettingError(f"rank {rank} failed: {text}")
                raise self._raised_by_all

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse to start where ranks were started with different facts."""
        facts_by_rank = self.gather(dict(facts))
        first_facts = facts_by_rank[0]
        for rank, rank_facts in enumerate(facts_by_rank):
            for name in (*first_facts, *rank_facts):
                first = first_facts.get(name)
                here = rank_facts.get(name)
                if here != first:
                    raise SettingError(
                        f"ranks disagree on {name}: rank 0 has {first!r}, rank {rank} has "
                        f"{here!r}. Start all of them with the same command, version and files."
                    )


class StopVote:
    """The votes of one round on whether all ranks stop.

    Every `every` epochs all ranks vote; one that is asked to stop stops them all. With
    `reads_later` a rank reads the answer with the next vote or at the end of the round, so that
    it does not wait for slower ranks. There is never more than one open vote: with two, ranks
    that lose another one could not leave.
    """

    def __init__(
        self,
        team: Team,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        every: int = 1,
        reads_later: bool = False,
    ):
        self.every = every
        self.reads_later = reads_later
        self.seconds_waited = 0.0
        """for ranks that took longer"""
        self._team = team
        self._should_stop = should_stop
        self._open: Callable[[], bool] | None = None  # reads the answer of the open vote

    def after(self, epoch: int) -> bool:
        """Whether all ranks stop after this epoch of the round; the first, 0, has no vote."""
        if epoch == 0 or epoch % self.every > 0:
            return False
        began = time.perf_counter()
        stops = self._read()
        if not stops:
            self._open = self._team.ask(self._should_stop())
            if not self.reads_later:
                stops = self._read()
        self.seconds_waited += time.perf_counter() - began
        return stops

    def at_the_end(self) -> bool:
        """Whether all ranks stop by a vote that is still open when the round has been played."""
        began = time.perf_counter()
        stops = self._read()
        self.seconds_waited += time.perf_counter() - began
        return stops

    def _read(self) -> bool:
        if self._open is None:
            return False
        answer = self._open
        self._open = None
        return answer()

    def for_next_round(self, epochs: int, seconds: float) -> "StopVote":
        """The votes of the next round, after one of so many epochs in so many seconds.

        Several ranks vote about every two seconds. They read answers later unless an epoch takes
        longer than that.
        """
        if self._team.size == 1:
            return StopVote(self._team, self._should_stop)
        epochs_per_second = epochs / seconds
        return StopVote(
            self._team,
            self._should_stop,
            every=min(max(1, int(_VOTE_SECONDS * epochs_per_second)), epochs),
            reads_later=epochs_per_second > 1 / _VOTE_SECONDS,
        )


def code_digest() -> str:
    """Changes with any line of this package."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def is_launched() -> bool:
    """Whether torchrun started this process, or something that sets the same variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def was_restarted() -> bool:
    """Whether torchrun started the ranks again after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def joined_team(wants_cuda: bool) -> Iterator[Team]:
    """The team that this process was started for; a team of one without torchrun.

    It ends for all ranks together.
    """
    if not is_launched():
        yield Team()
        return
    device = _own_device() if wants_cuda else torch.device("cpu")
    try:
        store, rank, size = next(rendezvous("env://", timeout=_JOINING))
        fresh = _store_of_this_start(store, rank, size)
        is_shared = wants_cuda and _is_shared(fresh, rank, size, device)
        backend = "cpu:gloo,cuda:nccl" if wants_cuda and not is_shared else "gloo"
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=_MEETING)
        _set_pg_timeout(_PATIENCE)
        pulse = Pulse(rank, size)
    except (RuntimeError, ValueError, OSError) as problem:
        address = os.environ.get("MASTER_ADDR", "unset")
        port = os.environ.get("MASTER_PORT", "unset")
        raise DeviceError(
            f"rank {os.environ['RANK']} cannot join the others at {address}:{port} "
            f"({str(problem).splitlines()[0]}). Give all the same --master-addr or "
            f"--rdzv-endpoint, in reach of all, with a free port; where there are several "
            f"networks, name the one: GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0."
        ) from problem
    ended: BaseException | None = None
    try:
        yield Team(rank, size, device, is_shared)
    except BaseException as problem:
        ended = problem
    pulse.end(ended)
    dist.destroy_process_group()
    # a RuntimeError is what torch raises where a message did not get through
    is_by_torch = isinstance(ended, RuntimeError) and not isinstance(ended, EsperError)
    if pulse.heard and (ended is None or is_by_torch):
        raise DeviceError(pulse.heard) from ended
    if ended is not None:
        raise ended


def _own_device() -> torch.device:
    """This rank's GPU; where there are more ranks than GPUs, they take turns."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceError(
            "the configuration asks for CUDA, but this machine has no GPU; "
            "--set devices='[\"cpu\"]'."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.cuda.set_device(device)
    return device


def _is_shared(store: Store, rank: int, size: int, device: torch.device) -> bool:
    """Whether two ranks have one GPU, which NCCL refuses; all ranks get the same answer."""
    gpu = torch.cuda.get_device_properties(device).uuid
    store.set(f"gpu/{rank}", f"{socket.gethostname()} {gpu}")
    gpus = {store.get(f"gpu/{number}") for number in range(size)}
    return len(gpus) < size


class Pulse:
    """A thread that meets the other ranks each second, whatever its own rank does.

    A rank that does not come to a meeting is lost. A timeout cannot find that out: waiting for a
    rank that trains a long epoch looks like waiting for one that is cut off.
    """

    def __init__(self, rank: int, size: int):
        self.heard = ""  # what became of another rank; empty while nothing has
        self._rank = rank
        self._size = size
        self._awaited_rank = 0
        self._ending: str | None = None  # None while this rank works, empty when it ended well
        self._is_over = threading.Event()
        self._group = dist.new_group(backend="gloo", timeout=_SILENCE)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def end(self, problem: BaseException | None) -> None:
        """Report how this rank has ended; returns when all have ended, or when one has failed."""
        if problem is None:
            self._ending = ""
        elif isinstance(problem, EsperError):
            self._ending = str(problem)
        else:
            self._ending = f"{type(problem).__name__}: {problem}"
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        """Meet until all ranks have ended or one has failed; then end a rank that cannot know."""
        endings: list[str | None] = [None]
        try:
            while None in endings and not any(endings):
                self._is_over.wait(_BEAT.total_seconds())
                endings = self._meet()
            self.heard = "; ".join(
                f"rank {rank} failed: {ending}"
                for rank, ending in enumerate(endings)
                if ending and rank != self._rank
            )
        except RuntimeError:
            self.heard = (
                f"rank {self._rank} lost contact with rank {self._awaited_rank}. A process, "
                f"a machine or the network is down; when all are back, continue with the same "
                f"command and --resume."
            )
        # a rank that does not end by itself trains, or waits on a GPU
        if self.heard and not self._is_over.wait(5 * _BEAT.total_seconds()):
            complain(self.heard)
            os._exit(2)

    def _meet(self) -> list[str | None]:
        """How each rank has ended, by way of rank 0.

        Rank 0 asks one rank at a time, so that it knows which one does not answer.
        """
        endings = [self._ending] * self._size
        if self._rank > 0:
            dist.send_object_list([self._ending], 0, self._group)
            dist.recv_object_list(endings, 0, self._group)
            return endings
        for rank in range(1, self._size):
            self._awaited_rank = rank
            received: list[str | None] = [None]
            dist.recv_object_list(received, rank, self._group)
            endings[rank] = received[0]
        for rank in range(1, self._size):
            self._awaited_rank = rank
            dist.send_object_list(endings, rank, self._group)
        return endings


def _store_of_this_start(store: Store, rank: int, size: int) -> Store:
    """The store under a prefix that only this start of the team uses.

    torchrun keeps a store over restarts, with what dead ranks wrote. A rank asks under a name
    that no other process has; only a running rank 0 can answer it.
    """
    name = uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", name)
        start = store.get(f"answer/{name}").decode()
        store.set(f"{start}/{rank}", "")
        return PrefixStore(start, store)
    until = time.monotonic() + _JOINING.total_seconds()
    missing = list(range(1, size))
    while missing:
        if time.monotonic() > until:
            minutes = _JOINING.total_seconds() / 60
            raise RuntimeError(f"rank {missing[0]} did not join within {minutes:g} minutes")
        for late_rank in missing:
            if store.check([f"asks/{late_rank}"]):
                asked_as = store.get(f"asks/{late_rank}").decode()
                store.set(f"answer/{asked_as}", name)
        time.sleep(0.02)
        missing = [late for late in missing if not store.check([f"{name}/{late}"])]
    return PrefixStore(name, store)
