"""Who may see what through `esper serve`, and that nothing can be changed, reached or injected
through it.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from urllib.request import urlopen

import anyio
import pytest
from starlette.testclient import TestClient

from dashboard.web_runs import append, grow_run, grown_epoch, ppo_run
from esper.dashboard import server
from esper.dashboard.report import STATIC, script_names
from esper.dashboard.server import HEADERS, build_app, choose_token, listen, serve
from esper.leyline.errors import MissingExtraError, SaveError, SettingError

TOKEN = "a-token-of-more-than-16-letters"
EVERYWHERE = (
    "/",
    "/static/start.js",
    "/api/runs",
    "/api/runs/grow/episode",
    "/api/compare?run=grow",
)


@pytest.fixture
def runs(tmp_path):
    grow_run(tmp_path / "runs" / "grow")
    ppo_run(tmp_path / "runs" / "ppo")
    return tmp_path / "runs"


@pytest.fixture
def client(runs):
    with TestClient(build_app(runs), base_url="http://127.0.0.1:8765") as client:
        yield client


@pytest.fixture
def locked(runs):
    with TestClient(build_app(runs, TOKEN), base_url="http://127.0.0.1:8765") as client:
        yield client


def test_the_list_tells_every_run(client):
    rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows.keys() == {"grow", "ppo"}
    assert (rows["grow"]["kind"], rows["grow"]["status"], rows["grow"]["done"]) == (
        "run",
        "finished",
        6,
    )


def test_a_run_that_cannot_be_read_does_not_hide_the_others(client, runs):
    grow_run(runs / "odd")
    os.chmod(runs / "odd" / "events-0.jsonl", 0)
    (runs / "odd" / "config.json").write_text("{")
    rows = {row["name"]: row["status"] for row in client.get("/api/runs").json()["runs"]}
    assert rows == {"grow": "finished", "ppo": "finished", "odd": "damaged"}


def test_an_episode_of_an_older_round_is_read_from_disk(client):
    old, new = (
        client.get(f"/api/runs/ppo/episode?host=1&round={number}").json() for number in (0, 1)
    )
    assert [episode["spans"][0]["slot"] for episode in (old, new)] == ["r0c0", "r0c1"]
    assert client.get("/api/runs/ppo/episode?host=1&round=7").status_code == 404


def test_compare_puts_runs_side_by_side(client, runs):
    grow_run(runs / "never", "never", test=0.8)
    found = client.get("/api/compare?run=grow&run=never&run=grow").json()
    assert [run["header"]["name"] for run in found["runs"]] == ["grow", "never"]
    assert found["runs"][0]["curves"]["epoch"] == [1, 2, 3, 4, 5, 6]
    assert found["standings"][0]["gain"]["mean"] == pytest.approx(0.1)


@pytest.mark.parametrize("query", ["host=x", "host=-1", "host=99999999999", "host=²"])
def test_what_is_no_number_is_refused(client, query):
    assert client.get(f"/api/runs/grow/episode?{query}").status_code == 400


# -- who may come ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*EVERYWHERE, "/nowhere", "/api/runs/none/episode"])
def test_every_answer_has_the_strict_headers(client, path):
    headers = client.get(path).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/static/start.js", "/api/runs", "/api/runs/grow/episode"])
def test_there_is_nothing_to_change(client, method, path):
    assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost@evil.example", ""],
)
@pytest.mark.parametrize("path", EVERYWHERE)
def test_a_name_that_somebody_made_point_here_gets_no_answer(client, host, path):
    assert client.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8765", "127.0.0.1", "127.0.0.1:1", "[::1]:8765"]
)
def test_our_own_names_get_one(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_with_a_token_an_address_in_numbers_is_a_name_too_and_others_are_not(locked):
    known = {"cookie": f"{cookie_name(locked)}={TOKEN}"}
    assert locked.get("/api/runs", headers={"host": "192.0.2.7:8765", **known}).status_code == 200
    assert locked.get("/api/runs", headers={"host": "evil.example", **known}).status_code == 421


def cookie_name(client):
    return client.get(f"/?token={TOKEN}").headers["set-cookie"].split("=")[0]


@pytest.mark.parametrize("path", EVERYWHERE)
def test_without_the_token_nothing_is_told(locked, path):
    assert locked.get(path).status_code == 401
    separator = "&" if "?" in path else "?"
    for wrong in ("", "wrong", TOKEN[:-1], TOKEN + "x", "ÿ"):
        assert locked.get(f"{path}{separator}token={wrong}").status_code == 401
        assert "set-cookie" not in locked.get(f"{path}{separator}token={wrong}").headers


def test_the_token_buys_a_cookie_that_opens_the_rest(locked):
    answer = locked.get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(
        answer.headers["set-cookie"].split("; ")
    )
    assert locked.get("/api/runs").status_code == 200  # the client keeps cookies
    locked.cookies.clear()
    assert locked.get("/api/runs").status_code == 401
    assert (
        locked.get("/api/runs", headers={"cookie": f"{cookie_name(locked)}=wrong"}).status_code
        == 401
    )


def test_the_token_is_taken_at_the_page_only(locked):
    assert locked.get(f"/api/runs?token={TOKEN}").status_code == 401


def test_tokens_are_compared_in_constant_time(locked, monkeypatch):
    compared = []
    monkeypatch.setattr(
        server.secrets, "compare_digest", lambda one, other: compared.append((one, other)) or False
    )
    locked.get("/?token=guess")
    assert (b"guess", TOKEN.encode()) in compared


# -- what can be reached ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2fruns%2fgrow", "grow%2f..%2fgrow", "grow%00", "%2fetc", "", "Grow"],
)
@pytest.mark.parametrize("rest", ["", "/episode", "/stream"])
def test_only_names_of_runs_in_the_folder_are_answered(client, name, rest):
    assert client.get(f"/api/runs/{name}{rest}").status_code == 404


def test_a_link_to_a_run_elsewhere_is_no_run(client, runs, tmp_path):
    grow_run(tmp_path / "private")
    (runs / "link").symlink_to(tmp_path / "private")
    assert client.get("/api/runs/link/episode").status_code == 404
    assert "link" not in client.get("/api/runs").text


def test_a_link_inside_of_a_run_is_not_followed(client, runs, tmp_path):
    secret = grow_run(tmp_path / "private")
    (runs / "odd").mkdir()
    (runs / "odd" / "config.json").write_text((secret / "config.json").read_text())
    (runs / "odd" / "events-0.jsonl").symlink_to(secret / "events-0.jsonl")
    assert client.get("/api/runs/odd/episode").status_code == 404
    (runs / "grow" / "events-1.jsonl").symlink_to(secret / "events-0.jsonl")
    before = len((runs / "grow" / "events-0.jsonl").read_text().splitlines())
    assert client.get("/api/compare?run=grow").json()["runs"][0]["header"]["events"] == before


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
    ],
)
def test_only_the_page_s_own_files_are_handed_out(client, path):
    assert client.get(path).status_code == 404


def test_a_run_that_goes_away_is_not_found(client, runs):
    assert client.get("/api/runs/grow/episode").status_code == 200
    (runs / "grow" / "config.json").unlink()
    assert client.get("/api/runs/grow/episode").status_code == 404


def test_script_in_an_event_stays_text_in_json(client, runs):
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    append(runs / "grow", {"type": "HostRolledBack", "host": 0, "epoch": 5, "reason": bad})
    answer = client.get("/api/runs/grow/episode")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["rollbacks"][0]["reason"] == bad


def test_an_endless_line_does_no_harm(client, runs):
    with open(runs / "grow" / "events-0.jsonl", "ab") as file:
        file.write(b'{"type": "GrowthHint", "text": "' + b"x" * 3_000_000 + b'"}\n')
    append(runs / "grow", grown_epoch(0, 6))
    answer = client.get("/api/runs/grow/episode")
    assert len(answer.content) < 200_000
    assert answer.json()["epochs"]["epoch"][-1] == 7


SCRIPTS = [name for name in script_names() if name != "uPlot.iife.min.js"]


def test_the_page_loads_every_script_there_is(client):
    assert sorted(SCRIPTS) == sorted(
        path.name for path in STATIC.glob("*.js") if "uPlot" not in path.name
    )
    for name in SCRIPTS:
        assert f'src="static/{name}"' in client.get("/").text


@pytest.mark.parametrize("name", ["app.css", *SCRIPTS])
def test_the_page_asks_no_other_host_for_anything(client, name):
    assert "//" not in client.get("/").text.replace("http://www.w3.org/2000/svg", "")
    text = client.get(f"/static/{name}").text.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text.replace("https://", "http://").split("//", 1)[0]
    assert "://" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_never_turns_text_into_html(client, name):
    answer = client.get(f"/static/{name}")
    assert answer.status_code == 200
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert way not in answer.text


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_page_fits_on_a_few_screens(name):
    lines = (STATIC / name).read_text().splitlines()
    assert len(lines) <= 300
    assert [line for line in lines if len(line) > 110] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_page_is_strict_and_says_what_it_is(name):
    """The scripts share one scope, where a name that nothing declares would become a global."""
    first, second, *_ = (STATIC / name).read_text().splitlines()
    assert first == '"use strict";'
    assert second.startswith("// ")


# -- the stream ------------------------------------------------------------------------------------


def follow(runs, act):
    async def play():
        app = build_app(runs)
        site = app.state.site
        feed = await site.find("grow")
        messages = site._follow(feed, 0)
        await act(site, messages)
        await messages.aclose()

    anyio.run(play)


async def told(messages):
    return json.loads((await anext(messages)).removeprefix("data: "))


def test_the_stream_tells_what_is_appended_and_nothing_twice(runs):
    async def act(site, messages):
        first = await told(messages)
        append(runs / "grow", grown_epoch(0, 6))
        second = await told(messages)
        assert (first["whole"], second["whole"]) == (True, False)
        assert second["header"]["events"] == first["header"]["events"] + 1
        assert len(second["log"]) == 1
        assert "rest" not in second

    follow(runs, act)


def test_many_clients_share_one_reader_and_the_stream_ends_when_the_server_does(runs):
    async def act(site, messages):
        other = site._follow(await site.find("grow"), 1)
        await told(messages)
        await told(other)
        assert len(site.feeds) == 2
        assert (await site.find("grow")) is site.feeds[runs / "grow"]
        site.is_closing = lambda: True
        assert [message async for message in other] == []

    follow(runs, act)


def test_a_quiet_stream_gives_signs_of_episode(runs, monkeypatch):
    monkeypatch.setattr(server, "HEARTBEAT", -1.0)
    monkeypatch.setattr(server, "IDLE_TICK", 0.0)

    async def act(site, messages):
        await told(messages)
        assert (await anext(messages)).startswith(":")

    follow(runs, act)


# -- where it listens ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_this_machine_needs_no_token(host):
    assert choose_token(host, None) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "box.example", "localhost.example"])
def test_every_other_address_gets_a_token_of_its_own(host):
    first, second = choose_token(host, None), choose_token(host, None)
    assert first != second
    assert len(first) >= 32


@pytest.mark.parametrize("token", ["", "short", "sixteen letters; and more"])
def test_a_token_that_is_easy_to_guess_or_no_cookie_is_refused(token):
    with pytest.raises(SettingError, match="at least 16"):
        choose_token("127.0.0.1", token)


def test_a_port_that_is_taken_is_told():
    with listen("127.0.0.1", 0) as taken, pytest.raises(SettingError, match="--port"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_a_folder_that_is_not_there_is_told_before_anything_listens(tmp_path):
    with pytest.raises(SaveError, match="cannot list"):
        serve(tmp_path / "none")


def test_without_the_extra_the_way_to_get_it_is_told(monkeypatch):
    monkeypatch.delitem(sys.modules, "esper.dashboard.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'esper-lite\[web\]'"):
        importlib.import_module("esper.dashboard.server")


def test_serve_prints_its_address_answers_there_and_ends_on_request(runs):
    code = (
        "from pathlib import Path; from esper.dashboard.server import serve; serve(Path(), port=0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=runs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urlopen(f"{address}api/runs", timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 2
        with urlopen(
            f"{address}api/runs/grow/stream", timeout=20
        ) as stream:  # an open stream does not hold it up
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0, process.stderr.read()
        assert process.stderr.read() == ""


def test_by_default_only_this_machine_is_listened_to():
    assert serve.__defaults__[0] == "127.0.0.1"
    with listen("127.0.0.1", 0) as listener:
        assert listener.family is socket.AF_INET
