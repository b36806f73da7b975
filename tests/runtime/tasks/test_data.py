"""Readers of official files:

what is missing, damaged or not what it claims to be is an error that says so.
"""

import gzip
import pickle
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.leyline.errors import DataError
from esper.runtime.population import Population
from esper.runtime.tasks.data import (
    load_cifar10,
    load_fashion_mnist,
    load_half_size,
    load_shakespeare,
    load_tinystories,
)
from esper.runtime.tasks.registry import get_task

FROM_DISK = {
    "cifar10": "cifar-10-batches-py/data_batch_1",
    "cifar10_deep": "cifar-10-batches-py/data_batch_1",
    "cifar10_varied": "cifar-10-batches-py/data_batch_1",
    "cifar10_resnet": "cifar-10-batches-py/data_batch_1",
    "fashion_mnist": "FashionMNIST/raw/train-images-idx3-ubyte.gz",
    "fashion_varied": "FashionMNIST/raw/train-images-idx3-ubyte.gz",
    "shakespeare": "shakespeare/input.txt",
    "tinystories": "TinyStories/TinyStories-train.txt",
}


@pytest.mark.parametrize("name", FROM_DISK)
def test_a_missing_data_set_says_what_to_put_where(name, tmp_path):
    with pytest.raises(DataError) as caught:
        get_task(name).load(tmp_path)
    for part in (
        str(tmp_path / FROM_DISK[name]),
        f"DATA/{FROM_DISK[name]}",
        "ESPER_DATA",
        "esper data fetch",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", FROM_DISK)
def test_without_a_data_folder_the_error_says_how_to_name_one(name):
    with pytest.raises(DataError, match="--data-root or ESPER_DATA"):
        get_task(name).load(None)


def test_a_folder_in_the_place_of_a_file_is_a_missing_file(tmp_path):
    (tmp_path / "shakespeare" / "input.txt").mkdir(parents=True)
    with pytest.raises(DataError, match=r"shakespeare/input.txt"):
        load_shakespeare(tmp_path)


# -- CIFAR-10 --------------------------------------------------------------------------------------

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def batch_of(number, count=8, **changes):
    """One batch as the official files have it: bytes for keys, pixels in rows, labels in a list."""
    data = np.full((count, 3072), number, np.uint8)
    data[:, 0] = np.arange(count)
    return {
        b"data": data,
        b"labels": [i % 10 for i in range(count)],
        b"batch_label": b"x",
    } | changes


def write_batches(root, *replaced, name="data_batch_2", count=8):
    """All six files, `replaced` (an object, or a file's bytes) in the place of one of them."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    for number, own in enumerate(BATCHES):
        (folder / own).write_bytes(pickle.dumps(batch_of(number, count), protocol=2))
    for whole in replaced:
        (folder / name).write_bytes(
            whole if isinstance(whole, bytes) else pickle.dumps(whole, protocol=2)
        )
    return root


def test_cifar10_is_five_batches_carved_and_the_official_test_batch(tmp_path):
    splits = load_cifar10(write_batches(tmp_path))
    assert [len(splits.train), len(splits.validation)] == [34, 6]
    pixels = torch.cat([splits.train.inputs, splits.validation.inputs])
    assert pixels.shape[1:] == (3, 32, 32)
    assert sorted(pixels[:, 2, 31, 31].tolist()) == sorted(list(range(5)) * 8)
    test = splits.test.open_for_final_report()
    assert test.inputs[:, 0, 0, 0].tolist() == list(range(8))
    assert test.targets.tolist() == list(range(8))


def test_cifar10_keeps_channels_rows_and_columns_in_order(tmp_path):
    batch = batch_of(0, count=1)
    batch[b"data"] = (np.arange(3072) % 251).astype(np.uint8)[None]
    splits = load_cifar10(write_batches(tmp_path, batch, name="test_batch"))
    image = splits.test.open_for_final_report().inputs[0]
    assert int(image[2, 5, 7]) == (2 * 1024 + 5 * 32 + 7) % 251


def test_cifar10_pixels_are_of_about_unit_range(tmp_path):
    images, _ = load_cifar10(write_batches(tmp_path)).train.gather(torch.arange(34))
    assert float(images.min()) == pytest.approx(-1.9)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_arrays_pickled_by_old_and_new_numpy_are_read(tmp_path, module):
    written = pickle.dumps(batch_of(1), protocol=2)
    for own in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        written = written.replace(b"c" + own + b"\n", b"c" + module.encode() + b"\n")
    assert b"c" + module.encode() in written
    assert len(load_cifar10(write_batches(tmp_path, written)).train) == 34


class Command:
    """What an attacker would put into a file."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "function",
    [__import__("os").system, eval, exec, __import__("subprocess").call],
    ids=lambda f: f.__name__,
)
def test_a_file_that_wants_to_run_something_is_refused_and_runs_nothing(tmp_path, function, capfd):
    evil = batch_of(1) | {b"extra": Command(function, "print('ran')")}
    with pytest.raises(DataError, match=rf"\w+\.{function.__name__}"):
        load_cifar10(write_batches(tmp_path, evil))
    assert "ran" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {b"labels": [10] + [0] * 7},
        {b"labels": [-1] + [0] * 7},
        {b"labels": [0] * 7},
        {b"labels": None},
        {b"labels": ["a"] * 8},
        {b"data": np.zeros((8, 3071), np.uint8)},
        {b"data": np.zeros((3072, 8), np.uint8)},
        {b"data": np.zeros((8, 3072), np.float64)},
        {b"data": None},
        {b"data": np.zeros((0, 3072), np.uint8), b"labels": []},
    ],
    ids=[
        "label 10",
        "label -1",
        "too few labels",
        "no labels",
        "words",
        "too few pixels",
        "pixels by image",
        "floats",
        "no pixels",
        "empty",
    ],
)
def test_a_batch_of_another_form_is_refused_by_name(tmp_path, changes):
    with pytest.raises(DataError, match="data_batch_2"):
        load_cifar10(write_batches(tmp_path, batch_of(1) | changes))


@pytest.mark.parametrize("whole", [{}, [], 5, None, {"data": 1}, b"not a pickle"], ids=str)
def test_a_file_that_is_no_batch_is_refused_by_name(tmp_path, whole):
    with pytest.raises(DataError, match="data_batch_2"):
        load_cifar10(write_batches(tmp_path, whole))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.9, 0.99])
def test_a_truncated_batch_is_refused_by_name(tmp_path, share):
    written = pickle.dumps(batch_of(1), protocol=2)
    with pytest.raises(DataError, match="data_batch_2"):
        load_cifar10(write_batches(tmp_path, written[: int(len(written) * share)]))


def test_damaged_bytes_are_refused_or_harmless(tmp_path):
    """Whatever byte of a batch's head is wrong, the reader fails in its own words or reads
    pixels.
    """
    write_batches(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    whole = path.read_bytes()
    for place in (*range(120), *range(len(whole) - 80, len(whole))):
        for value in (0x00, 0x2E, 0x52, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            with suppress(DataError):
                load_cifar10(tmp_path)


# -- Fashion-MNIST ---------------------------------------------------------------------------------

FILES = {
    "train-images-idx3-ubyte.gz": (2051, 60_000, 784),
    "train-labels-idx1-ubyte.gz": (2049, 60_000, 1),
    "t10k-images-idx3-ubyte.gz": (2051, 10_000, 784),
    "t10k-labels-idx1-ubyte.gz": (2049, 10_000, 1),
}


def write_idx(folder, name, magic=None, size=None, body=None):
    """One file of the right form, of zeros unless told otherwise."""
    own_magic, count, width = FILES[name]
    shape = [count, 28, 28] if own_magic == 2051 else [count]
    header = struct.pack(f">{1 + len(shape)}i", magic or own_magic, *shape)
    data = header + (bytes(count * width if size is None else size) if body is None else body)
    (folder / name).write_bytes(gzip.compress(data, compresslevel=1))


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    root = tmp_path_factory.mktemp("fashion")
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name in FILES:
        write_idx(folder, name)
    write_idx(
        folder, "t10k-labels-idx1-ubyte.gz", body=bytes(index % 10 for index in range(10_000))
    )
    return root


@pytest.fixture
def broken(fashion, tmp_path):
    """The same root, to be broken:

    the files are links to the whole ones until they are replaced.
    """
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).symlink_to(fashion / "FashionMNIST" / "raw" / name)
    return tmp_path


def replace_idx(root, name, **options):
    path = root / "FashionMNIST" / "raw" / name
    path.unlink()
    if options:
        write_idx(path.parent, name, **options)
    return path


LABELS = "train-labels-idx1-ubyte.gz"


def test_fashion_mnist_is_split_into_train_validation_and_the_official_test_set(fashion):
    splits = load_fashion_mnist(fashion)
    test = splits.test.open_for_final_report()
    assert [len(splits.train), len(splits.validation), len(test)] == [51_000, 9_000, 10_000]
    assert test.targets[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    images, _ = test.gather(torch.arange(2))
    assert images.shape == (2, 1, 28, 28)
    assert float(images[0, 0, 0, 0]) == pytest.approx(-0.286 / 0.353)


def test_images_of_half_the_size_are_means_of_four_pixels(tmp_path):
    root = write_batches(tmp_path)
    whole = load_cifar10(root)
    half = load_half_size(root, load=load_cifar10)
    assert half.train.inputs.shape == (len(whole.train), 3, 16, 16)
    assert half.train.inputs.dtype == torch.uint8
    corner = whole.train.inputs[:, :, :2, :2].float().mean((2, 3))
    assert torch.equal(half.train.inputs[:, :, 0, 0], corner.round().to(torch.uint8))
    for part in ("train", "validation"):
        assert torch.equal(getattr(half, part).targets, getattr(whole, part).targets)
    test = half.test.open_for_final_report()
    assert test.inputs.shape[1:] == (3, 16, 16)


@pytest.mark.parametrize("name", ["fashion_varied", "cifar10_varied"])
def test_families_of_photographs_and_clothes_play_their_hosts(name, tmp_path, fashion):
    family = replace(get_task(name), epochs=2)
    root = fashion if name == "fashion_varied" else write_batches(tmp_path, count=1200)
    pool = family.load(root)
    population = Population(family, [1, 3], splits=pool)
    for run in population.runs:
        assert len(run.splits.train) == run.variation.examples
        assert run.task.lr == run.variation.lr
    assert {run.variation.depth for run in population.runs} == {2, 3}
    population.train_epoch()
    population.evaluate()


def test_one_missing_file_is_named(broken):
    replace_idx(broken, "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz"):
        load_fashion_mnist(broken)


def test_a_truncated_gzip_file_is_refused(broken, fashion):
    path = replace_idx(broken, LABELS)
    whole = (fashion / "FashionMNIST" / "raw" / LABELS).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train-labels.*gzip"):
        load_fashion_mnist(broken)


def test_a_damaged_gzip_stream_is_refused(broken, fashion):
    path = replace_idx(broken, LABELS)
    whole = bytearray((fashion / "FashionMNIST" / "raw" / LABELS).read_bytes())
    whole[20:40] = b"\xff" * 20
    path.write_bytes(whole)
    with pytest.raises(DataError, match="train-labels"):
        load_fashion_mnist(broken)


@pytest.mark.parametrize("content", [b"<html>not found</html>", b""], ids=["html", "empty"])
def test_a_file_that_is_not_gzip_is_refused(broken, content):
    replace_idx(broken, LABELS).write_bytes(content)
    with pytest.raises(DataError, match="train-labels"):
        load_fashion_mnist(broken)


@pytest.mark.parametrize(
    "options", [{"size": 59_999}, {"magic": 2050}, {"size": 0}, {"size": 60_001}], ids=str
)
def test_a_file_that_is_not_the_official_one_is_refused(broken, options):
    replace_idx(broken, LABELS, **options)
    with pytest.raises(DataError, match=f"{LABELS} .*bytes"):
        load_fashion_mnist(broken)


def test_labels_out_of_range_are_refused(broken):
    replace_idx(broken, LABELS, body=bytes(59_999) + b"\x0a")
    with pytest.raises(DataError, match=r"0 to 10, .*10 classes"):
        load_fashion_mnist(broken)


# -- texts -----------------------------------------------------------------------------------------


def write_text(root, name, size):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(index % 250 for index in range(size)))


def test_shakespeare_is_bytes_cut_in_order(tmp_path):
    write_text(tmp_path, "shakespeare/input.txt", 2000)
    splits = load_shakespeare(tmp_path, context=10)
    test = splits.test.open_for_final_report()
    assert [len(part.tokens) for part in (splits.train, splits.validation, test)] == [
        1700,
        150,
        150,
    ]
    assert [int(part.tokens[0]) for part in (splits.train, splits.validation, test)] == [
        0,
        1700 % 250,
        1850 % 250,
    ]


def test_tinystories_keeps_its_official_validation_file_for_the_end(tmp_path):
    write_text(tmp_path, "TinyStories/TinyStories-train.txt", 1000)
    write_text(tmp_path, "TinyStories/TinyStories-valid.txt", 300)
    splits = load_tinystories(tmp_path, context=10)
    assert [len(splits.train.tokens), len(splits.validation.tokens)] == [950, 50]
    assert splits.test.open_for_final_report().tokens[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 80])
def test_a_text_that_is_too_short_is_refused(tmp_path, size):
    write_text(tmp_path, "shakespeare/input.txt", size)
    with pytest.raises(DataError, match=r"tokens .*65"):
        load_shakespeare(tmp_path)


def test_an_empty_story_file_is_refused(tmp_path):
    write_text(tmp_path, "TinyStories/TinyStories-train.txt", 5000)
    write_text(tmp_path, "TinyStories/TinyStories-valid.txt", 0)
    with pytest.raises(DataError, match=r"0 tokens .*65"):
        load_tinystories(tmp_path)
