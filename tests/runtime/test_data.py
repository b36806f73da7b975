"""Splits are disjoint and the same everywhere; a data set that is missing or broken is an error that says so."""

import gzip
import hashlib
import struct
import sys

import pytest
import torch

from esper.leyline.errors import DataError
from esper.runtime.data import DataSet, Split, load_digits, load_fashion_mnist

FILES = {
    "train-images-idx3-ubyte.gz": (2051, 60_000, 784),
    "train-labels-idx1-ubyte.gz": (2049, 60_000, 1),
    "t10k-images-idx3-ubyte.gz": (2051, 10_000, 784),
    "t10k-labels-idx1-ubyte.gz": (2049, 10_000, 1),
}


def rows(split):
    return {image.numpy().tobytes() for image in split.images}


# -- digits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return load_digits()


def test_digits_are_split_into_the_same_sizes(digits):
    assert [len(digits.train), len(digits.validation), len(digits.test)] == [1223, 215, 359]


def test_no_digit_is_in_two_splits(digits):
    train, validation, test = rows(digits.train), rows(digits.validation), rows(digits.test)
    assert not (train & validation) | (train & test) | (validation & test)


def test_every_digit_is_in_one_split(digits):
    assert len(rows(digits.train) | rows(digits.validation) | rows(digits.test)) == 1797


def test_the_split_of_the_digits_is_the_same_in_every_run(digits):
    again = load_digits()
    assert torch.equal(again.validation.images, digits.validation.images)
    digest = hashlib.sha256(bytes(digits.validation.labels.tolist() + digits.test.labels.tolist())).hexdigest()
    assert digest[:16] == "4de744db8b7cc4cb"


def test_digits_do_not_depend_on_the_random_state(digits):
    torch.manual_seed(12345)
    assert torch.equal(load_digits().train.labels, digits.train.labels)


def test_digits_are_images_of_about_unit_range_with_every_class_in_every_split(digits):
    for split in (digits.train, digits.validation, digits.test):
        assert split.images.shape[1:] == (1, 8, 8)
        assert (split.images.min(), split.images.max()) == (-0.5, 0.5)
        assert set(split.labels.tolist()) == set(range(10))


def test_digits_without_scikit_learn_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install"):
        load_digits()


def test_a_split_needs_as_many_labels_as_images():
    with pytest.raises(DataError, match="3 images and 2 labels"):
        Split(torch.zeros(3, 1, 2, 2), torch.zeros(2))
    with pytest.raises(DataError, match="at least 1"):
        Split(torch.zeros(0, 1, 2, 2), torch.zeros(0))


def test_moving_a_data_set_moves_every_split(digits):
    moved = digits.to("meta")
    assert isinstance(moved, DataSet)
    assert {s.images.device.type for s in (moved.train, moved.validation, moved.test)} == {"meta"}


# -- Fashion-MNIST -----------------------------------------------------------------------------------------------------


def write(folder, name, magic=None, size=None, body=None):
    """One file of the right form, of zeros unless told otherwise."""
    own_magic, count, width = FILES[name]
    shape = [count, 28, 28] if own_magic == 2051 else [count]
    header = struct.pack(f">{1 + len(shape)}i", magic or own_magic, *shape)
    data = header + (bytes(count * width if size is None else size) if body is None else body)
    (folder / name).write_bytes(gzip.compress(data, compresslevel=1))


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """A root with all four files; pixel values and labels are made up."""
    root = tmp_path_factory.mktemp("fashion")
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name in FILES:
        write(folder, name)
    write(folder, "t10k-labels-idx1-ubyte.gz", body=bytes(index % 10 for index in range(10_000)))
    return root


@pytest.fixture
def broken(fashion, tmp_path):
    """The same root, to be broken: the files are links to the whole ones until they are replaced."""
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).symlink_to(fashion / "FashionMNIST" / "raw" / name)
    return tmp_path


def replace(root, name, **options):
    path = root / "FashionMNIST" / "raw" / name
    path.unlink()
    if options:
        write(path.parent, name, **options)
    return path


@pytest.fixture(scope="module")
def fashion_set(fashion):
    return load_fashion_mnist(fashion)


def test_fashion_mnist_is_split_into_train_validation_and_the_official_test_set(fashion_set):
    assert [len(s) for s in (fashion_set.train, fashion_set.validation, fashion_set.test)] == [51_000, 9_000, 10_000]
    assert fashion_set.train.images.shape[1:] == (1, 28, 28)


def test_fashion_mnist_keeps_labels_in_order_and_scales_pixels(fashion_set):
    assert fashion_set.test.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert float(fashion_set.test.images[0, 0, 0, 0]) == pytest.approx(-0.286 / 0.353)


def test_a_missing_file_is_named_and_so_is_what_to_do(broken):
    replace(broken, "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz is not there. Put the official"):
        load_fashion_mnist(broken)


def test_a_missing_folder_is_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is not there"):
        load_fashion_mnist(tmp_path)


def test_a_truncated_file_is_refused(broken, fashion):
    path = replace(broken, "train-labels-idx1-ubyte.gz")
    whole = (fashion / "FashionMNIST" / "raw" / path.name).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train-labels.*not a complete gzip file"):
        load_fashion_mnist(broken)


def test_a_damaged_stream_is_refused(broken, fashion):
    path = replace(broken, "train-labels-idx1-ubyte.gz")
    whole = bytearray((fashion / "FashionMNIST" / "raw" / path.name).read_bytes())
    whole[20:40] = b"\xff" * 20
    path.write_bytes(whole)
    with pytest.raises(DataError, match="train-labels"):
        load_fashion_mnist(broken)


def test_a_file_that_is_not_gzip_is_refused(broken):
    replace(broken, "train-labels-idx1-ubyte.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="not a complete gzip file"):
        load_fashion_mnist(broken)


@pytest.mark.parametrize("options", [{"size": 59_999}, {"magic": 2050}, {"size": 0}, {"size": 60_001}])
def test_a_file_that_is_not_the_official_one_is_refused(broken, options):
    replace(broken, "train-labels-idx1-ubyte.gz", **options)
    with pytest.raises(DataError, match="not the official file"):
        load_fashion_mnist(broken)
