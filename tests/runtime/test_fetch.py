"""Downloads from a server on loopback: whole, resumed, broken off, false, unpacked, refused; nothing half-written."""

import hashlib
import io
import re
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from esper.cli import main
from esper.leyline.errors import DataError, UnknownNameError
from esper.runtime.fetch import ALWAYS_THERE, SOURCES, RemoteFile, fetch, is_fetched
from esper.runtime.tasks import TASKS

TEXT = bytes(range(256)) * 4096  # 1 MiB: more than one read


class Handler(BaseHTTPRequestHandler):
    """Serves `server.content`; what the server is unable or unwilling to do is set on the server."""

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        body = server.content.get(self.path)
        if body is None:
            return self.send_error(404)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.has_ranges else 0
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start + server.shifted}-{len(body) - 1}/{len(body)}")
        if server.announces_size:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : server.breaks_off_at])
        return None

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.content, running.asked = {"/text": TEXT}, []
    running.has_ranges = running.announces_size = True
    running.breaks_off_at, running.shifted = None, 0
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def checksum(content, algorithm="sha256"):
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def one_text(server, known=True, **changes):
    """A table of sources with one text on the loopback server."""
    url = f"http://127.0.0.1:{server.server_port}/text"
    settings = {"url": url, "path": "texts/text.txt", "checksum": checksum(TEXT) if known else None} | changes
    return {"text": (RemoteFile(**settings),)}


def files_in(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


def leave_part(root, content):
    part = root / "texts" / "text.txt.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(content)
    return part


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_a_download_ends_whole_and_alone_under_its_name(server, tmp_path):
    seen = []
    notes = fetch("text", tmp_path / "new", sources=one_text(server), progress=lambda *step: seen.append(step))
    assert (tmp_path / "new/texts/text.txt").read_bytes() == TEXT
    assert files_in(tmp_path) == ["new/texts/text.txt"]
    assert "1,048,576 bytes" in notes[0]
    assert seen[0] == ("text.txt", 0, len(TEXT))
    assert seen[-1] == ("text.txt", len(TEXT), len(TEXT))


def test_a_part_is_gone_on_with(server, tmp_path):
    leave_part(tmp_path, TEXT[:1000])
    seen = []
    fetch("text", tmp_path, sources=one_text(server), progress=lambda *step: seen.append(step))
    assert server.asked == ["bytes=1000-"]
    assert seen[0] == ("text.txt", 1000, len(TEXT))
    assert (tmp_path / "texts/text.txt").read_bytes() == TEXT
    assert files_in(tmp_path) == ["texts/text.txt"]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.has_ranges = False
    leave_part(tmp_path, b"x" * 1000)
    fetch("text", tmp_path, sources=one_text(server))
    assert (server.asked, (tmp_path / "texts/text.txt").read_bytes()) == (["bytes=1000-"], TEXT)


def test_a_part_that_was_complete_is_only_checked(server, tmp_path):
    leave_part(tmp_path, TEXT)
    fetch("text", tmp_path, sources=one_text(server))
    assert server.asked == [f"bytes={len(TEXT)}-"]
    assert files_in(tmp_path) == ["texts/text.txt"]


def test_a_part_longer_than_the_file_is_started_over(server, tmp_path):
    leave_part(tmp_path, TEXT + b"more")
    fetch("text", tmp_path, sources=one_text(server))
    assert server.asked == [f"bytes={len(TEXT) + 4}-", None]
    assert (tmp_path / "texts/text.txt").read_bytes() == TEXT


def test_an_answer_that_begins_elsewhere_is_not_appended(server, tmp_path):
    server.shifted = 1
    leave_part(tmp_path, TEXT[:1000])
    fetch("text", tmp_path, sources=one_text(server))
    assert server.asked == ["bytes=1000-", None]
    assert (tmp_path / "texts/text.txt").read_bytes() == TEXT


@pytest.mark.parametrize("known", [True, False])
def test_a_transfer_that_broke_off_is_kept_and_gone_on_with(server, tmp_path, known):
    server.breaks_off_at = 300_000
    with pytest.raises(DataError, match=r"300,000 of 1,048,576 bytes.*text\.txt\.part"):
        fetch("text", tmp_path, sources=one_text(server, known))
    assert files_in(tmp_path) == ["texts/text.txt.part"]
    server.breaks_off_at = None
    fetch("text", tmp_path, sources=one_text(server, known))
    assert server.asked == [None, "bytes=300000-"]
    assert (tmp_path / "texts/text.txt").read_bytes() == TEXT


@pytest.mark.parametrize("left", [b"", b"x" * 1000])
def test_a_wrong_checksum_leaves_nothing(server, tmp_path, left):
    if left:
        leave_part(tmp_path, left)
    else:
        server.content["/text"] = TEXT[:-1] + b"!"
    with pytest.raises(DataError, match=r"sha256:\w+, .*sha256:\w+"):
        fetch("text", tmp_path, sources=one_text(server))
    assert files_in(tmp_path) == []


def test_without_a_published_checksum_the_size_is_what_is_known(server, tmp_path):
    notes = fetch("text", tmp_path, sources=one_text(server, known=False))
    assert "unverified" in notes[0]
    server.announces_size = False
    notes = fetch("text", tmp_path / "again", sources=one_text(server, known=False))
    assert "unverified" in notes[0]


# -- what is there already ---------------------------------------------------------------------------------------------


def test_what_is_there_and_right_is_kept_without_asking_the_server(server, tmp_path):
    fetch("text", tmp_path, sources=one_text(server))
    server.asked.clear()
    (note,) = fetch("text", tmp_path, sources=one_text(server))
    assert note.startswith(f"{tmp_path / 'texts/text.txt'} ")
    assert "unverified" in fetch("text", tmp_path, sources=one_text(server, known=False))[0]
    assert server.asked == []


def test_what_is_there_and_another_file_is_never_overwritten(server, tmp_path):
    mine = leave_part(tmp_path, b"").with_suffix("")
    mine.write_bytes(b"my own notes")
    with pytest.raises(DataError, match=r"text\.txt .*sha256"):
        fetch("text", tmp_path, sources=one_text(server))
    assert mine.read_bytes() == b"my own notes"


# -- archives ----------------------------------------------------------------------------------------------------------

MEMBERS = {"batches/one": b"1" * 1000, "batches/two": b"2" * 1000}


def pack(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
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
    assert "2 files unpacked from batches.tar.gz" in notes[-1]


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
    with pytest.raises(DataError, match=r"batches.tar.gz"):
        fetch("batches", root, sources=one_archive(server, pack(MEMBERS | {name: b"evil"})))
    assert files_in(tmp_path) == ["deep/root/batches.tar.gz"]


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"<html>not found</html>", "batches.tar.gz"),
        (pack(MEMBERS)[:-20], "batches.tar.gz"),
        (pack({"batches/one": MEMBERS["batches/one"]}), "batches/two"),
        (pack(MEMBERS | {"batches/two": b"another"}), "batches/two"),
    ],
)
def test_an_archive_without_the_official_files_puts_none_in_place(server, tmp_path, packed, message):
    with pytest.raises(DataError, match=message):
        fetch("batches", tmp_path, sources=one_archive(server, packed))
    assert files_in(tmp_path) == ["batches.tar.gz"]


# -- no network, no disk, no such name ---------------------------------------------------------------------------------


def nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_without_a_network_every_missing_file_is_named_with_its_address_and_place(tmp_path):
    gone = nobody_listens()
    sources = {"pair": tuple(RemoteFile(f"{gone}/{name}", f"pair/{name}") for name in ("one", "two", "three"))}
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair/one").write_bytes(b"1")
    with pytest.raises(DataError, match=r"http://.*\(.*refused\)") as refusal:
        fetch("pair", tmp_path, sources=sources)
    message = str(refusal.value)
    for name in ("two", "three"):
        assert f"{gone}/{name} to {tmp_path / 'pair' / name}" in message
    assert f"to {tmp_path / 'pair/one'}" not in message
    assert files_in(tmp_path) == ["pair/one"]


def test_a_name_that_no_server_has_leaves_no_folder(tmp_path):
    sources = {"text": (RemoteFile("http://esper.invalid/text", "texts/text.txt"),)}
    with pytest.raises(DataError, match=r"esper\.invalid/text"):
        fetch("text", tmp_path / "new", sources=sources)
    assert not (tmp_path / "new").exists()


def test_a_server_that_falls_silent_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("esper.runtime.transfer._TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/text"
        with pytest.raises(DataError, match=r"\(timed out\)"):
            fetch("text", tmp_path, sources={"text": (RemoteFile(address, "text"),)})


def test_a_file_that_the_server_does_not_have_is_named(server, tmp_path):
    server.content.clear()
    with pytest.raises(DataError, match=r"/text .*404"):
        fetch("text", tmp_path, sources=one_text(server))
    assert files_in(tmp_path) == []


def test_a_root_that_cannot_be_written_is_an_error_that_names_it(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file.*--data-root"):
        fetch("text", tmp_path / "file", sources=one_text(server))


def test_a_forbidden_folder_is_an_error_that_names_it(server, tmp_path, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match=r"texts: Permission denied"):
        fetch("text", tmp_path, sources=one_text(server))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_says_so(server, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space"):
        fetch("text", tmp_path, sources=one_text(server))


@pytest.mark.parametrize("name", ALWAYS_THERE)
def test_what_is_always_there_says_so(name):
    (note,) = fetch(name, None)
    assert note.startswith(f"{name} ")
    assert ALWAYS_THERE[name] in note
    assert is_fetched(name, None)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'fashion'.*'fashion_mnist'"):
        fetch("fashion", None)


def test_a_data_set_needs_a_folder():
    with pytest.raises(DataError, match="--data-root or ESPER_DATA"):
        fetch("cifar10", None)


def test_the_command_draws_a_bar_and_says_what_became_of_each_file(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SOURCES, "shakespeare", one_text(server)["text"])
    with pytest.raises(SystemExit) as leaving:
        main(["data", "fetch", "shakespeare", "--data-root", str(tmp_path)])
    out = capsys.readouterr().out
    assert not leaving.value.code
    assert "text.txt" in out.splitlines()[0]
    assert re.search(f"{tmp_path / 'texts/text.txt'} .*1,048,576 bytes", out)


# -- the official table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_fetched_or_is_always_there(name):
    assert (name in SOURCES) != (name in ALWAYS_THERE)


@pytest.mark.parametrize("name", SOURCES)
def test_files_go_where_the_reader_looks_for_them(name, tmp_path):
    """The reader asks for one file after the other; each it asks for is one that fetching would have put there."""
    wanted = {path for file in SOURCES[name] for path in file.members or (file.path,)}
    assert not is_fetched(name, tmp_path)
    with pytest.raises(DataError, match="data fetch") as refusal:
        TASKS[name].load(tmp_path)
    assert re.match(rf"{tmp_path}/(\S+) ", str(refusal.value))[1] in wanted
    for path in wanted:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * 40)  # too little for any of them
    assert is_fetched(name, tmp_path)
    with pytest.raises(DataError) as refusal:
        TASKS[name].load(tmp_path)
    assert "esper data fetch" not in str(refusal.value)


@pytest.mark.parametrize("name", SOURCES)
def test_checksums_have_a_known_form(name):
    known = [file.checksum for file in SOURCES[name] if file.checksum]
    known += [value for file in SOURCES[name] for value in file.members.values()]
    for value in known:
        algorithm, digits = value.split(":")
        assert len(digits) == 2 * hashlib.new(algorithm).digest_size
        assert int(digits, 16)
