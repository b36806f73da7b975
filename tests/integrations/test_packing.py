"""The files of a garden inside a framework's own checkpoint, which may come from anybody."""

import pytest
import torch

from esper.integrations import pack, unpack
from esper.leyline.errors import SaveError


def bytes_of(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def test_what_is_unpacked_is_what_was_packed(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "manifest.json").write_bytes(b"{}")
    (tmp_path / "saved" / "garden-model.safetensors").write_bytes(b"\0\1\2")
    unpack(pack(tmp_path / "saved"), tmp_path / "again")
    found = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert found == {"manifest.json": b"{}", "garden-model.safetensors": b"\0\1\2"}


@pytest.mark.parametrize("name", ["{}/evil", "../evil", "a/../../evil", "..", "", "a\0b", 3])
def test_a_name_that_leads_out_of_the_folder_is_refused_and_nothing_is_written(tmp_path, name):
    name = name.format(tmp_path) if isinstance(name, str) else name
    files = {"manifest.json": bytes_of(b"{}"), name: bytes_of(b"evil")}
    with pytest.raises(SaveError, match=r"^[^\n]*not a plain file name, and nothing was written"):
        unpack(files, tmp_path / "inside" / "garden")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "files",
    [{"manifest.json": b"{}"}, {"a": torch.zeros(3)}, [bytes_of(b"x")], bytes_of(b"x"), "text"],
    ids=lambda files: type(files).__name__,
)
def test_what_is_no_file_of_bytes_is_refused(tmp_path, files):
    if isinstance(files, torch.Tensor):
        files = {"deep": {"er": files}}
    with pytest.raises(SaveError, match=r"^[^\n]*instead of bytes\. Use a checkpoint"):
        unpack(files, tmp_path / "garden")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        torch.zeros(2, dtype=torch.uint8, device="meta"),
        torch.zeros(2, dtype=torch.uint8).to_sparse(),
    ],
    ids=["meta", "sparse"],
)
def test_a_tensor_without_bytes_of_its_own_is_refused(content, tmp_path):
    with pytest.raises(SaveError, match="instead of bytes"):
        unpack({"garden-model.safetensors": content}, tmp_path)
    assert not list(tmp_path.iterdir())
