"""The page with many runs, and with clients that do not keep to the rules."""

import asyncio
import shutil
import socket
import threading
import time
from contextlib import suppress

import pytest
import uvicorn
from starlette.testclient import TestClient

from dashboard.web_runs import append, grow_run, grown_epoch
from esper.dashboard import server
from esper.dashboard.server import Connection, build_app, listen

RUNS = 30


@pytest.fixture
def runs(tmp_path):
    grow_run(tmp_path / "one")
    for number in range(RUNS):
        shutil.copytree(tmp_path / "one", tmp_path / "runs" / f"run-{number:02d}")
    return tmp_path / "runs"


@pytest.fixture
def client(runs):
    with TestClient(build_app(runs), base_url="http://127.0.0.1:8765") as client:
        yield client


def listed(client):
    """Every run's row once all have been read."""
    for _ in range(100):
        rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
        if "being read" not in {row["status"] for row in rows.values()}:
            return rows
    raise AssertionError("some runs are never read to their end")


def test_the_list_keeps_no_run_in_memory(client):
    assert {row["status"] for row in listed(client).values()} == {"finished"}
    feeds = client.app.state.site.feeds.values()
    assert len(feeds) == RUNS
    assert [feed for feed in feeds if feed.reader is not None] == []


def test_a_run_that_did_not_change_is_not_read_again(client, monkeypatch):
    before = listed(client)
    monkeypatch.setattr(server, "RunReader", None)
    after = listed(client)
    for name, row in after.items():
        assert row.pop("age_seconds") >= before[name].pop("age_seconds")
    assert after == before


def test_long_runs_are_read_behind_short_ones(client, runs, monkeypatch):
    append(runs / "run-00", *[grown_epoch(0, 6)] * 99)
    asked = []
    monkeypatch.setattr(
        server,
        "header",
        lambda found, real=server.header: (asked.append(found.folder), real(found))[1],
    )
    listed(client)
    assert asked[-1].name == "run-00"


def test_a_row_never_falls_back_while_its_run_is_read_again(client, runs, monkeypatch):
    before = listed(client)
    append(runs / "run-07", grown_epoch(0, 6))
    real = server.header

    def slow(reader):
        time.sleep(1.5)
        return real(reader)

    monkeypatch.setattr(server, "header", slow)
    rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows["run-07"]["events"] == before["run-07"]["events"]
    time.sleep(1.0)
    assert listed(client)["run-07"]["events"] == before["run-07"]["events"] + 1


def test_a_run_that_somebody_looks_at_stays_in_memory_for_a_while(client, monkeypatch):
    listed(client)
    assert (
        client.get("/api/runs/run-03/episode").status_code == 200
    )  # read again, however short ago the list did
    listed(client)
    feed = next(feed for path, feed in client.app.state.site.feeds.items() if path.name == "run-03")
    assert feed.reader is not None
    monkeypatch.setattr(server, "KEPT_SECONDS", -1.0)
    listed(client)
    assert feed.reader is None


# -- clients ---------------------------------------------------------------------------------------


@pytest.fixture
def port(runs, monkeypatch):
    """A server that is as impatient as a test."""
    monkeypatch.setattr(server, "PATIENCE", 0.4)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        build_app(runs, "a-token-of-more-than-16-letters"), http=Connection, ws="none"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])))
    thread.start()
    yield listener.getsockname()[1]
    running.should_exit = True
    thread.join()


def connect(port, text):
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(text)
    return client


def is_ended(client):
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


WHOLE = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def test_a_request_that_never_comes_whole_is_ended(port):
    silent, half, second = connect(port, b""), connect(port, WHOLE[:20]), connect(port, WHOLE)
    assert b" 401 " in second.recv(65536)
    second.sendall(WHOLE[:20])
    assert [is_ended(client) for client in (silent, half, second)] == [True] * 3


def test_bytes_that_trickle_in_do_not_buy_time(port):
    client, sent = connect(port, b""), 0
    with suppress(ConnectionResetError, BrokenPipeError):
        while sent < 200:  # many more are needed to fill the buffer
            client.sendall(b"x")
            sent += 1
            time.sleep(0.05)
    assert sent < 100
