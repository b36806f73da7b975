"""Splits do not overlap and never move; the test split stays sealed; gathering equals a slow loop
over examples.
"""

import hashlib
import sys

import pytest
import torch

from esper.leyline.errors import DataError, MissingExtraError
from esper.runtime.splits import (
    PAD,
    SealedSplit,
    Splits,
    TensorSplit,
    TokenSplit,
    carve,
    draw_offsets,
)
from esper.runtime.tasks.data import load_blobs, load_digits, load_python_text


def rows(split):
    return [example.numpy().tobytes() for example in split.inputs]


def numbered(count):
    return TensorSplit(
        torch.arange(float(count))[:, None], torch.arange(count) % 3, scale=0.5, shift=-1.0
    )


def opened(splits):
    return splits.train, splits.validation, splits.test.open_for_final_report()


# -- carving ---------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module", params=[(load_digits, 1797), (load_blobs, 1536)], ids=["digits", "blobs"]
)
def loaded(request):
    if request.param[0] is load_digits:
        pytest.importorskip("sklearn")
    return request.param[0](), request.param[0], request.param[1]


def test_every_example_is_in_exactly_one_split(loaded):
    splits, _, count = loaded
    together = [row for split in opened(splits) for row in rows(split)]
    assert len(together) == count
    assert len(set(together)) == count


def test_a_split_does_not_depend_on_the_random_state(loaded):
    splits, load, _ = loaded
    torch.manual_seed(12345)
    for split, again in zip(opened(splits), opened(load()), strict=True):
        assert torch.equal(split.inputs, again.inputs)
        assert torch.equal(split.targets, again.targets)


def test_digits_are_split_the_same_on_every_machine():
    pytest.importorskip("sklearn")
    train, validation, test = opened(load_digits())
    assert [len(train), len(validation), len(test)] == [1223, 215, 359]
    digest = hashlib.sha256(bytes(validation.targets.tolist() + test.targets.tolist())).hexdigest()
    assert digest[:16] == "49f1d3a3c08dd90f"


def test_digits_are_images_of_about_unit_range_with_every_class_in_every_split():
    pytest.importorskip("sklearn")
    for split in opened(load_digits()):
        images, labels = split.gather(torch.arange(len(split)))
        assert images.shape[1:] == (1, 8, 8)
        assert (float(images.min()), float(images.max())) == (-0.5, 0.5)
        assert set(labels.tolist()) == set(range(10))


def test_digits_without_scikit_learn_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        load_digits()


def test_carving_keeps_inputs_with_their_targets_and_the_scale():
    train, validation = carve(numbered(40), share=0.25)
    for split, count in ((train, 30), (validation, 10)):
        assert len(split) == count
        assert torch.equal(split.inputs[:, 0] % 3, split.targets)
        assert (split.scale, split.shift) == (0.5, -1.0)


@pytest.mark.parametrize(("count", "share"), [(3, 0.15), (1, 0.5), (5, 1.0)])
def test_too_few_examples_to_carve_are_refused(count, share):
    with pytest.raises(DataError, match=f"{count} training examples .*/"):
        carve(numbered(count), share=share)


@pytest.mark.parametrize(("inputs", "targets"), [(3, 2), (0, 0)])
def test_a_split_needs_as_many_targets_as_inputs_and_one(inputs, targets):
    with pytest.raises(DataError, match=f"{inputs} inputs and {targets} targets"):
        TensorSplit(torch.zeros(inputs, 2), torch.zeros(targets))


def test_the_python_text_is_cut_into_parts_one_after_the_other():
    train, validation, test = (split.tokens for split in opened(load_python_text(size=10_000)))
    assert [len(train), len(validation), len(test)] == [8500, 750, 750]
    whole = bytes(torch.cat([train, validation, test]).tolist())
    assert b"import" in whole


# -- the seal --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["inputs", "targets", "gather", "to", "example", "tokens", "anything"]
)
def test_the_test_split_is_sealed(name):
    with pytest.raises(DataError, match=rf"sealed.* '{name}'.*final_scores"):
        getattr(load_blobs().test, name)


def test_the_seal_does_not_show_what_it_holds():
    assert "tensor" not in repr(SealedSplit(numbered(5)))


def test_the_length_of_a_sealed_split_is_not_told():
    with pytest.raises((DataError, TypeError)):
        len(load_blobs().test)


def test_moving_splits_moves_all_three_and_keeps_the_seal():
    moved = load_blobs().to("meta")
    assert isinstance(moved.test, SealedSplit)
    assert {split.inputs.device.type for split in opened(moved)} == {"meta"}


# -- gathering -------------------------------------------------------------------------------------


def test_inputs_are_scaled_and_shifted_when_they_are_gathered():
    inputs, targets = numbered(9).gather(torch.tensor([4, 0, 4]))
    assert inputs[:, 0].tolist() == [1.0, -1.0, 1.0]
    assert targets.tolist() == [1, 0, 1]


def test_bytes_become_floating_point():
    split = TensorSplit(
        torch.tensor([[0], [255]], dtype=torch.uint8), torch.zeros(2), scale=1 / 255
    )
    assert split.gather(torch.tensor([1]))[0].dtype == torch.float32


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 8, 8), (1, 5, 7)])
def test_a_gathered_crop_equals_a_slow_crop_of_every_image(channels, height, width):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, channels, height, width), generator=draw).to(torch.uint8)
    split = TensorSplit(images, torch.arange(6), scale=1 / 255, shift=-0.5).with_border()
    picked = torch.randint(6, (40,), generator=draw)
    offsets = draw_offsets(40, draw)
    found, targets = split.gather(picked, offsets)
    assert torch.equal(targets, picked)
    for index, row in enumerate(picked.tolist()):
        down, right, mirror = offsets[:, index].tolist()
        canvas = torch.zeros(channels, height + 2 * PAD, width + 2 * PAD)
        canvas[:, PAD : PAD + height, PAD : PAD + width] = images[row]
        crop = canvas[:, down : down + height, right : right + width]
        crop = crop.flip(-1) if mirror else crop
        torch.testing.assert_close(found[index], crop / 255 - 0.5)


def test_an_unshifted_crop_is_the_image_itself():
    split = TensorSplit(torch.rand(4, 3, 6, 6), torch.arange(4))
    offsets = torch.tensor([[PAD] * 4, [PAD] * 4, [0] * 4])
    assert torch.equal(split.with_border().gather(torch.arange(4), offsets)[0], split.inputs)


def test_only_images_can_be_shifted():
    with pytest.raises(DataError, match="shifts images"):
        numbered(4).with_border()


@pytest.mark.parametrize(
    "split", [numbered(4), TokenSplit(torch.arange(30), 5)], ids=["tensors", "tokens"]
)
def test_an_example_is_two_inputs_as_a_host_sees_them(split):
    inputs, _ = split.gather(torch.tensor([0, 0]))
    assert torch.equal(split.example(), inputs)


def test_an_example_of_bordered_images_has_the_size_of_an_image():
    assert TensorSplit(torch.rand(4, 3, 6, 6), torch.arange(4)).with_border().example().shape == (
        2,
        3,
        6,
        6,
    )


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_first_examples_are_the_first_and_look_the_same(count):
    part = numbered(9).first(count)
    assert len(part) == count
    for mine, whole in zip(
        part.gather(torch.arange(count)), numbered(9).gather(torch.arange(count)), strict=True
    ):
        assert torch.equal(mine, whole)


def test_the_first_of_bordered_images_keep_their_border():
    split = TensorSplit(torch.rand(4, 3, 6, 6), torch.arange(4)).with_border()
    offsets = draw_offsets(2, torch.Generator().manual_seed(0))
    assert torch.equal(
        split.first(2).gather(torch.arange(2), offsets)[0],
        split.gather(torch.arange(2), offsets)[0],
    )


# -- texts -----------------------------------------------------------------------------------------


def test_a_window_is_context_tokens_and_the_token_after_each():
    split = TokenSplit(torch.arange(22, dtype=torch.uint8), context=5)
    inputs, targets = split.gather(torch.tensor([3, 0]))
    assert inputs.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]
    assert inputs.dtype == torch.long


@pytest.mark.parametrize(("tokens", "windows"), [(6, 1), (10, 1), (11, 2), (21, 4)])
def test_every_window_has_a_token_after_its_last(tokens, windows):
    split = TokenSplit(torch.arange(tokens), context=5)
    assert len(split) == windows
    assert split.gather(torch.arange(windows))[1].max() < tokens


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_text_without_a_window_is_refused(tokens):
    with pytest.raises(DataError, match=f"{tokens} tokens .* 6"):
        TokenSplit(torch.arange(tokens), context=5)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_first_windows_of_a_text_are_the_first(count):
    whole = TokenSplit(torch.arange(23), context=5)
    part = whole.first(count)
    assert len(part) == count
    for mine, all_of_it in zip(
        part.gather(torch.arange(count)), whole.gather(torch.arange(count)), strict=True
    ):
        assert torch.equal(mine, all_of_it)


def test_texts_are_not_augmented():
    with pytest.raises(DataError, match="augmentation"):
        TokenSplit(torch.arange(30), 5).with_border()


def test_moving_a_text_moves_its_tokens():
    splits = Splits(
        *(TokenSplit(torch.arange(30), 5) for _ in range(2)),
        SealedSplit(TokenSplit(torch.arange(30), 5)),
    )
    assert {split.tokens.device.type for split in opened(splits.to("meta"))} == {"meta"}
