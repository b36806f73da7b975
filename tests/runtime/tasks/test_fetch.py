"""Downloads from a server on loopback:

whole, broken off, false, unpacked, refused; nothing half-written.
"""

import gzip
import hashlib
import io
import socket
import stat
import sys
import tarfile
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest

from esper.cli import main
from esper.leyline.errors import DataError, MissingExtraError, UnknownNameError
from esper.runtime.tasks.fetch import SOURCES, RemoteFile, fetch, is_fetched
from esper.runtime.tasks.registry import TASKS

TEXT = bytes(range(256)) * 4096  # 1 MiB: more than one chunk


class Handler(BaseHTTPRequestHandler):
    """Serves `server.content`; `server.breaks_off_at` has, for each answer to come, after how many
    bytes it ends.
    """

    def do_GET(self):
        self.server.asked.append(self.path)
        body = self.server.content.get(self.path)
        if body is None:
            return self.send_error(404)
        self.send_response(200)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(
            body[: self.server.breaks_off_at.pop(0) if self.server.breaks_off_at else None]
        )
        return None

    def log_message(self, *arguments):
        pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No proxy, and no waiting between attempts."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.fixture
def server():
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.content, running.asked, running.breaks_off_at = {"/text": TEXT}, [], []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def checksum(content, algorithm="sha256"):
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def one_text(server, known=True):
    """A table of sources with one text on the loopback server."""
    url = f"http://127.0.0.1:{server.server_port}/text"
    return {"text": (RemoteFile(url, "texts/text.txt", checksum(TEXT) if known else None),)}


def files_in(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


# -- transfers -------------------------------------------------------------------------------------


def test_a_download_ends_whole_and_alone_under_its_name(server, tmp_path):
    notes = fetch("text", tmp_path / "new", sources=one_text(server))
    assert (tmp_path / "new/texts/text.txt").read_bytes() == TEXT
    assert files_in(tmp_path) == ["new/texts/text.txt"]
    assert "1,048,576 bytes, its checksum is right" in notes[0]


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_bar_is_drawn_where_somebody_looks(server, tmp_path, monkeypatch, capsys, is_looked_at):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_looked_at)
    fetch("text", tmp_path, sources=one_text(server))
    assert ("100%" in capsys.readouterr().err) is is_looked_at


@pytest.mark.skipif(sys.platform == "win32", reason="modes of files are POSIX")
def test_who_may_read_the_folder_may_read_the_file(server, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts").chmod(0o755)
    fetch("text", tmp_path, sources=one_text(server))
    assert stat.S_IMODE((tmp_path / "texts/text.txt").stat().st_mode) == 0o644


@pytest.mark.parametrize("known", [True, False])
def test_a_transfer_that_broke_off_is_started_again(server, tmp_path, known):
    server.breaks_off_at = [300_000]
    fetch("text", tmp_path, sources=one_text(server, known))
    assert len(server.asked) == 2
    assert (tmp_path / "texts/text.txt").read_bytes() == TEXT


@pytest.mark.parametrize("known", [True, False])
def test_a_transfer_that_breaks_off_every_time_leaves_nothing(server, tmp_path, known):
    server.breaks_off_at = [300_000] * 9
    with pytest.raises(DataError, match=r"text .*300000 .*copy"):
        fetch("text", tmp_path, sources=one_text(server, known))
    assert files_in(tmp_path) == []


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    server.content["/text"] = TEXT[:-1] + b"!"
    with pytest.raises(DataError, match=r"/text: .*sha256:\w+ .*text.txt"):
        fetch("text", tmp_path, sources=one_text(server))
    assert files_in(tmp_path) == []


def test_without_a_published_checksum_the_content_is_called_unverified(server, tmp_path):
    assert (
        "content is unverified" in fetch("text", tmp_path, sources=one_text(server, known=False))[0]
    )


# -- what already exists ---------------------------------------------------------------------------


def test_what_exists_and_is_right_is_kept_without_asking_the_server(server, tmp_path):
    fetch("text", tmp_path, sources=one_text(server))
    server.asked.clear()
    notes = fetch("text", tmp_path, sources=one_text(server))
    assert notes == [f"{tmp_path / 'texts/text.txt'} already exists; its checksum is right."]
    assert "unverified" in fetch("text", tmp_path, sources=one_text(server, known=False))[0]
    assert server.asked == []


def test_what_exists_and_is_another_file_is_never_overwritten(server, tmp_path):
    mine = tmp_path / "texts/text.txt"
    mine.parent.mkdir()
    mine.write_bytes(b"my own notes")
    with pytest.raises(DataError, match=r"text.txt .*checksum"):
        fetch("text", tmp_path, sources=one_text(server))
    assert (mine.read_bytes(), server.asked) == (b"my own notes", [])


# -- archives --------------------------------------------------------------------------------------

MEMBERS = {"batches/one": b"1" * 1000, "batches/two": b"2" * 1000}


def pack(members, *links):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for link in links:
            tar.addfile(link)
    return packed.getvalue()


def one_archive(server, packed, members=MEMBERS):
    server.content["/batches.tar.gz"] = packed
    url = f"http://127.0.0.1:{server.server_port}/batches.tar.gz"
    inside = {name: checksum(content, "md5") for name, content in members.items()}
    return {"batches": (RemoteFile(url, "batches.tar.gz", checksum(packed, "md5"), inside),)}


def test_an_archive_is_unpacked_and_goes(server, tmp_path):
    notes = fetch("batches", tmp_path, sources=one_archive(server, pack(MEMBERS)))
    assert files_in(tmp_path) == ["batches/one", "batches/two"]
    assert (tmp_path / "batches/two").read_bytes() == MEMBERS["batches/two"]
    assert "2 files unpacked from batches.tar.gz, their checksums are right" in notes[-1]


def test_an_archive_that_was_copied_there_is_unpacked_and_stays(server, tmp_path):
    packed = pack(MEMBERS)
    (tmp_path / "batches.tar.gz").write_bytes(packed)
    fetch("batches", tmp_path, sources=one_archive(server, packed))
    assert server.asked == []
    assert files_in(tmp_path) == ["batches.tar.gz", "batches/one", "batches/two"]


def test_an_unpacked_archive_is_not_fetched_again_until_a_file_is_missing(server, tmp_path):
    sources = one_archive(server, pack(MEMBERS))
    fetch("batches", tmp_path, sources=sources)
    assert len(fetch("batches", tmp_path, sources=sources)) == 2
    assert len(server.asked) == 1
    (tmp_path / "batches/one").unlink()
    fetch("batches", tmp_path, sources=sources)
    assert files_in(tmp_path) == ["batches/one", "batches/two"]


@pytest.mark.parametrize("name", ["../evil", "batches/../../evil"])
def test_an_archive_that_reaches_out_of_its_folder_is_refused(server, tmp_path, name):
    root = tmp_path / "deep" / "root"
    with pytest.raises(DataError, match="refused"):
        fetch("batches", root, sources=one_archive(server, pack(MEMBERS | {name: b"evil"})))
    assert files_in(tmp_path) == ["deep/root/batches.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("goal", ["../../secret", "/etc/hostname"])
def test_an_archive_that_links_out_of_its_folder_is_refused(server, tmp_path, kind, goal):
    root = tmp_path / "root"
    (tmp_path / "secret").write_bytes(MEMBERS["batches/one"])
    link = tarfile.TarInfo("batches/one")
    link.type, link.linkname = kind, goal
    with pytest.raises(DataError, match="refused"):
        fetch(
            "batches",
            root,
            sources=one_archive(server, pack({"batches/two": MEMBERS["batches/two"]}, link)),
        )
    assert files_in(tmp_path) == ["root/batches.tar.gz", "secret"]


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"<html>not found</html>", "was refused"),
        (pack(MEMBERS)[:-20], "was refused"),
        (pack({"batches/one": MEMBERS["batches/one"]}), "does not hold the official batches/two"),
        (pack(MEMBERS | {"batches/two": b"another"}), "does not hold the official batches/two"),
    ],
)
def test_an_archive_without_the_official_files_puts_none_in_place(
    server, tmp_path, packed, message
):
    with pytest.raises(DataError, match=message):
        fetch("batches", tmp_path, sources=one_archive(server, packed))
    assert files_in(tmp_path) == ["batches.tar.gz"]


# -- no network, no disk, no such name -------------------------------------------------------------


def nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_without_a_network_every_missing_file_is_named_with_its_address_and_place(tmp_path):
    gone = nobody_listens()
    sources = {
        "pair": tuple(
            RemoteFile(f"{gone}/{name}", f"pair/{name}") for name in ("one", "two", "three")
        )
    }
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair/one").write_bytes(b"1")
    with pytest.raises(DataError, match=r"pair .*refused.*copy") as refusal:
        fetch("pair", tmp_path, sources=sources)
    message = str(refusal.value)
    for name in ("two", "three"):
        assert f"{gone}/{name} to {tmp_path / 'pair' / name}" in message
    assert f"to {tmp_path / 'pair/one'}" not in message
    assert files_in(tmp_path) == ["pair/one"]


def test_a_name_that_no_server_has_is_one_line(tmp_path):
    sources = {"text": (RemoteFile("http://esper.invalid/text", "texts/text.txt"),)}
    with pytest.raises(DataError, match=r"text .*esper.invalid") as refusal:
        fetch("text", tmp_path / "new", sources=sources)
    assert "\n" not in str(refusal.value)
    assert files_in(tmp_path) == []


def test_a_server_that_falls_silent_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr("esper.runtime.tasks.fetch._TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/text"
        with pytest.raises(DataError, match=r"read timeout=0\.1"):
            fetch("text", tmp_path, sources={"text": (RemoteFile(address, "text"),)})


def test_a_refusal_is_all_that_is_said(tmp_path, caplog):
    logger = pooch.get_logger()
    logger.setLevel("DEBUG")
    logger.addHandler(caplog.handler)
    with pytest.raises(DataError):
        fetch("text", tmp_path, sources={"text": (RemoteFile(f"{nobody_listens()}/text", "text"),)})
    logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_file_that_the_server_does_not_have_is_named(server, tmp_path):
    server.content.clear()
    with pytest.raises(DataError, match=r"404.*Not Found.*/text.*copy"):
        fetch("text", tmp_path, sources=one_text(server))
    assert files_in(tmp_path) == []


def test_a_root_that_cannot_be_written_is_an_error_that_names_it(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file.*--data-root"):
        fetch("text", tmp_path / "file", sources=one_text(server))


def test_a_forbidden_folder_is_an_error_that_names_it(server, tmp_path, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.makedirs", refuse)
    with pytest.raises(DataError, match=r"Permission denied.*texts.*--data-root"):
        fetch("text", tmp_path, sources=one_text(server))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_says_so(server, tmp_path, monkeypatch):
    monkeypatch.setattr("pooch.core.temporary_file", lambda path: nullcontext("/dev/full"))
    with pytest.raises(DataError, match=r"No space .*disk"):
        fetch("text", tmp_path, sources=one_text(server))
    assert files_in(tmp_path) == []


def test_without_pooch_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'esper-lite\[data\]'"):
        fetch("shakespeare", tmp_path)
    assert not is_fetched("shakespeare", tmp_path)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in SOURCES])
def test_what_is_always_there_says_so(name):
    assert fetch(name, None) == [f"{name} needs no fetching. Its source: {TASKS[name].source}."]
    assert is_fetched(name, None)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'fashion'.*'fashion_mnist'\?"):
        fetch("fashion", None)


def test_a_data_set_needs_a_folder():
    with pytest.raises(DataError, match="--data-root or ESPER_DATA"):
        fetch("cifar10", None)


def test_the_command_says_what_became_of_each_file(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SOURCES, "shakespeare", one_text(server)["text"])
    with pytest.raises(SystemExit) as leaving:
        main(["data", "fetch", "shakespeare", "--data-root", str(tmp_path)])
    out = capsys.readouterr().out
    assert not leaving.value.code
    assert (
        f"{tmp_path / 'texts/text.txt'} fetched: 1,048,576 bytes, its checksum is right.\n" in out
    )


# -- the official table ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_official_files_can_be_fetched(name):
    assert (name in SOURCES) == TASKS[name].source.startswith("official")


@pytest.mark.parametrize("name", SOURCES)
def test_files_go_where_the_reader_looks_for_them(name, tmp_path):
    """The reader asks for one file after the other; each it asks for is one that fetching would
    have put there.
    """
    wanted = {path for file in SOURCES[name] for path in file.members or (file.path,)}
    assert not is_fetched(name, tmp_path)
    with pytest.raises(DataError, match=str(tmp_path)) as refusal:
        TASKS[name].load(tmp_path)
    assert str(refusal.value).split(" is not there")[0].removeprefix(f"{tmp_path}/") in wanted
    for path in wanted:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * 40)  # too little for any of them
    assert is_fetched(name, tmp_path)
    with pytest.raises(DataError) as refusal:
        TASKS[name].load(tmp_path)
    assert "is not there" not in str(refusal.value)


@pytest.mark.parametrize("name", SOURCES)
def test_checksums_have_a_known_form(name):
    known = [file.checksum for file in SOURCES[name] if file.checksum]
    known += [value for file in SOURCES[name] for value in file.members.values()]
    for value in known:
        algorithm, digits = value.split(":")
        assert len(digits) == 2 * hashlib.new(algorithm).digest_size
        assert int(digits, 16)
