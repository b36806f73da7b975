"""The page under load, with clients that do not keep to the rules, over folders that are damaged or hostile."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

from dashboard.web_runs import grow_run, ppo_run
from esper.dashboard import server
from faults.commands import Bad
from simic.tiny_runs import Forked
from tools.faults.damages import CONTENT, Scene
from tools.faults.driver import CLEAR, WORKS, Group

SECRET = "nobody-may-read-this"
ANSWERED_IN = 10.0
"""seconds in which an orderly request is answered, whatever others do; a tenth of it on a machine that is idle"""
TOKEN = "a-token-of-more-than-16-letters"


@contextmanager
def served(folder, place, patience=1.0, *more):
    """`esper serve` in a process of its own; its port. Whatever it says on standard error fails the case."""

    def prepare():
        server.PATIENCE = patience

    process = Forked(place / "process", ["serve", str(folder), "--port", "0", *more], prepare)
    try:
        ends = time.monotonic() + 20
        while not (process.out.exists() and process.out.read_text().endswith("\n")):
            if time.monotonic() > ends:
                raise Bad(f"the server does not begin: {process.err.read_text()}")
            time.sleep(0.02)
        yield (
            int(process.out.read_text().split("http://")[1].split("/")[0].rpartition(":")[2]),
            process.pid,
        )
        if os.waitpid(process.pid, os.WNOHANG)[0]:
            raise Bad(f"the server ended: {process.err.read_text()[-2000:]}")
        if "Traceback" in process.err.read_text():
            raise Bad(f"the server has a traceback: {process.err.read_text()[-2000:]}")
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


def asked(port, raw, seconds=ANSWERED_IN):
    """Send bytes; all that comes back until the other side is done or has answered one request."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(raw)
        answer, ends = b"", time.monotonic() + seconds
        try:
            while time.monotonic() < ends and (part := client.recv(1 << 16)):
                answer += part
                head, sign, body = answer.partition(b"\r\n\r\n")
                length = [
                    line
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ]
                if sign and length and len(body) >= int(length[0].split(b":")[1]):
                    break
        except ConnectionResetError:
            return answer
        except TimeoutError:
            if not answer:
                raise Bad(f"no answer in {seconds} seconds to {raw[:200]!r}") from None
    return answer


def get(port, path, *headers):
    lines = [f"GET {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", *headers]
    return asked(port, "\r\n".join([*lines, "", ""]).encode("latin-1", "replace"))


def status(answer):
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def judged(answer, raw):
    """Never an error of the server's own, never what lies outside."""
    if status(answer) >= 500:
        raise Bad(f"{answer[:300]!r} to {raw[:300]!r}")
    if SECRET.encode() in answer:
        raise Bad(f"a file outside was sent to {raw[:300]!r}")
    return WORKS if status(answer) in (200, 304) else CLEAR


def many_runs(place, count):
    folder = place / "runs"
    one = grow_run(place / "one")
    for number in range(count):
        shutil.copytree(one, folder / f"run-{number:03d}")
    ppo_run(folder / "ppo")
    (place / "secret.txt").write_text(SECRET)
    return folder


# -- requests --------------------------------------------------------------------------------------

PIECES = (
    "/",
    "//",
    "..",
    ".",
    "%2e%2e",
    "%2f",
    "%5c",
    "\\",
    "%00",
    "static",
    "api",
    "runs",
    "run-000",
    "episode",
    "stream",
)
PIECES += (
    "compare",
    "secret.txt",
    "etc/passwd",
    "?",
    "run=run-000",
    "&",
    "host=0",
    "round=-1",
    "host=99999999999",
    "token=",
)
PIECES += ("%c0%ae", "\udcff", "<script>", "{x}", "start.js", "config.json", "~", "%", "a" * 3000)
SOUND = (
    "/",
    "/api/runs",
    "/api/runs/run-000/episode?host=1",
    "/static/start.js",
    "/api/compare?run=ppo&run=run-001",
)


def drawn_request(draw):
    """Bytes that somebody may send."""
    kind = draw.randrange(8)
    path = "/" + "".join(
        draw.choice(PIECES) + draw.choice(["", "/"]) for _ in range(draw.randint(0, 6))
    )
    path = (
        draw.choice(SOUND)
        if draw.random() < 0.3
        else path.encode("utf-8", "surrogateescape").decode("latin-1")
    )
    if kind == 0:
        return draw.randbytes(draw.randint(1, 2000)) + b"\r\n\r\n"
    method = draw.choice(
        ["GET"] * 6
        + ["HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT", "OPTIONS", "g\x01t", "PRI"]
    )
    lines = [f"{method} {path} HTTP/{draw.choice(['1.1', '1.1', '1.0', '2.0', '9.9'])}"]
    lines += [
        f"host: "
        f"{draw.choice(['127.0.0.1'] * 5 + ['localhost', 'evil.example', '', '[::1', '127.0.0.1:x', 'a b'])}"
    ]
    lines += draw.sample(
        [
            *(
                "range: bytes=0-999999999999",
                "range: bytes=5-1",
                "range: bytes=-",
                "if-none-match: *",
                "x: " + "y" * 9000,
            ),
            *(
                "content-length: -1",
                "content-length: 5",
                "transfer-encoding: chunked",
                "cookie: a=b; esper-x=" + "z" * 500,
            ),
            *(
                "upgrade: websocket",
                "expect: 100-continue",
                "last-event-id: ☃",
                "accept-encoding: \x00",
                "host: twice",
            ),
            *(f"x-{number}: 1" for number in range(3)),
        ],
        draw.randint(0, 3),
    )
    body = draw.choice(["", "", "x" * 50, "ffffffffff\r\nx", "0\r\n\r\n"])
    return ("\r\n".join([*lines, "connection: close", "", ""]) + body).encode("utf-8", "replace")


def requests(draw, number, place):
    found = Counter()
    with served(many_runs(place, 3), place) as (port, _):
        for _ in range(80):
            raw = drawn_request(draw)
            if b"/stream" in raw.split(b"\r\n")[0]:  # has no end
                with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                    client.sendall(raw)
                    client.settimeout(0.3)
                    with suppress(OSError):
                        found[judged(client.recv(1 << 16), raw)] += 1
                continue
            found[judged(asked(port, raw), raw)] += 1
        if status(get(port, "/api/runs")) != 200:
            raise Bad("afterwards the list is not there")
    return found


def tokens(draw, number, place):
    """Without the token there is nothing, whatever is asked for."""
    found = Counter()
    with served(many_runs(place, 1), place, 1.0, "--token", TOKEN) as (port, _):
        for path in (
            "/",
            "/api/runs",
            "/api/compare?run=run-000",
            "/api/runs/run-000/episode",
            "/static/start.js",
            "/?token=x",
        ):
            for header in (
                "x: 1",
                "cookie: esper-00000000=x",
                f"authorization: Bearer {TOKEN}",
                f"cookie: {TOKEN}",
            ):
                if status(answer := get(port, path, header)) != 401:
                    raise Bad(f"{path} with {header}: {answer[:200]!r}")
                found[CLEAR] += 1
        for path in (f"/?token={TOKEN}",):
            if status(get(port, path)) != 200:
                raise Bad("the token opens nothing")
            found[WORKS] += 1
    return found


# -- many clients ----------------------------------------------------------------------------------


def load(draw, number, place):
    """So many at once, over so many runs; every answer comes, and memory does not follow the number of looks."""
    paths = (
        "/api/runs",
        "/api/runs/run-007/episode?host=1",
        "/",
        "/static/start.js",
        "/api/compare?run=run-001&run=run-002",
    )
    found, wrong, lock = Counter(), [], threading.Lock()
    with served(many_runs(place, 150), place) as (port, process):

        def look(seed):
            for turn in range(8):
                began = time.monotonic()
                path = paths[(seed + turn) % len(paths)]
                try:
                    verdict = judged(get(port, path), path.encode())
                except (Bad, OSError) as problem:
                    verdict, problem_of = None, problem
                seconds = time.monotonic() - began
                with lock:
                    if verdict != WORKS or seconds > ANSWERED_IN:
                        wrong.append(f"{path}: {verdict or problem_of} after {seconds:.1f} s")
                    found[WORKS] += 1

        _together(look, 40)
        memory = _memory(process)
        _together(look, 40)
        if _memory(process) > memory * 1.1 + (8 << 20):
            wrong.append(
                f"memory grows with looks: {memory >> 20} MB, then {_memory(process) >> 20} MB"
            )
    if wrong:
        raise Bad("; ".join(wrong[:5]))
    return found


def _together(act, count):
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _memory(process):
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def slow_clients(draw, number, place):
    """Half a request, no request, one byte at a time, no client that takes the answer: all are ended, others are served."""
    found = Counter()
    whole = b"GET /api/runs HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with served(many_runs(place, 20), place) as (port, process):
        get(port, "/api/runs")
        before = len(os.listdir(f"/proc/{process}/fd")) + 2
        slow = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
        for client in slow:
            client.sendall(whole[: draw.randrange(len(whole) - 2)])
        greedy = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(5)]
        for client in greedy:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.sendall(
                b"GET /static/uPlot.iife.min.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200
            )
        for _ in range(20):
            began = time.monotonic()
            if status(get(port, "/api/runs")) != 200 or time.monotonic() - began > ANSWERED_IN:
                raise Bad("an orderly request is not answered beside slow ones")
            found[WORKS] += 1
        for client in slow:
            with suppress(ConnectionResetError):
                while client.recv(1 << 16):  # a timeout fails the case
                    pass
            found[CLEAR] += 1
        ends = time.monotonic() + 20
        while (
            len(os.listdir(f"/proc/{process}/fd")) > before
        ):  # those who take nothing are ended by the server alone
            if time.monotonic() > ends:
                raise Bad(
                    f"{len(os.listdir(f'/proc/{process}/fd'))} descriptors are open "
                    f"afterwards, {before} before"
                )
            time.sleep(0.1)
        found[CLEAR] += len(greedy)
        for client in (*slow, *greedy):
            client.close()
    return found


# -- hostile folders -------------------------------------------------------------------------------


def damaged_folders(draw, number, place):
    """Real runs, damaged; every answer is one, and JSON where it says so."""
    (place / "secret.txt").write_text(SECRET)
    folder, found = place / "runs", Counter()
    folder.mkdir()
    for turn in range(6):
        scene = Scene(draw.choice(["run", "ppo"]), place / f"scene-{turn}")
        scene.damage(draw, 1)
        for _ in range(2):
            draw.choice(CONTENT)(draw, scene.folder / "events-0.jsonl", scene) if _is_file(
                scene.folder
            ) else None
        scene.folder.rename(folder / f"run-{turn}")
    with served(folder, place) as (port, _):
        for turn in range(6):
            for path in (
                "/api/runs",
                f"/api/runs/run-{turn}/episode",
                f"/api/compare?run=run-{turn}",
            ):
                answer = get(port, path)
                found[judged(answer, path.encode())] += 1
                if status(answer) == 200:
                    json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


def _is_file(folder):
    path = folder / "events-0.jsonl"
    return path.is_file() and not path.is_symlink()


GROUPS = [
    Group("page", "requests of all kinds", requests, 12),
    Group("page", "no token", tokens),
    Group("page", "many clients", load, 2, seconds=240),
    Group("page", "slow clients and halves of requests", slow_clients, 2),
    Group("page", "damaged folders", damaged_folders, 10),
]
