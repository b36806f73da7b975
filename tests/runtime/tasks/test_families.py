"""Families: what a variation draws, which one a host seed plays, and which examples it has."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from esper.kasmina.hosts import build_cnn_host
from esper.leyline.errors import DataError, EsperError, SettingError, UnknownNameError
from esper.runtime.splits import Splits
from esper.runtime.tasks.families import (
    LEAST_HELD_OUT,
    Span,
    Variety,
    at_rate,
    concrete,
    for_host,
    variation_of,
)
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import check_fit

FAMILY = get_task("digits_varied")
POOL = FAMILY.load(None)
SEEDS = range(200)


def build(width=4, depth=2):
    return build_cnn_host(blocks=depth, base_channels=width, in_channels=1, image_size=8)


def varied(**changes):
    return replace(FAMILY, varies=replace(FAMILY.varies, **changes))


# -- what is drawn ---------------------------------------------------------------------------------


def test_a_variation_draws_from_its_ranges():
    drawn = [FAMILY.varies.variation(number) for number in range(1000)]
    assert {variation.width for variation in drawn} == {2, 3, 4, 6, 8}
    assert all(60 <= variation.examples <= 1000 for variation in drawn)
    assert all(0 <= variation.noise <= 0.45 for variation in drawn)
    assert 450 < sum(variation.noise == 0 for variation in drawn) < 550
    # as many below the middle of the logarithms as above
    assert 450 < sum(variation.examples < (60 * 1000) ** 0.5 for variation in drawn) < 550


def test_what_a_number_draws_never_changes():
    drawn = [FAMILY.varies.variation(number).drawn for number in (0, 1, 17)]
    assert drawn == EVER
    assert [variation_of(FAMILY, seed).number for seed in (0, 1, 2**70)] == PLAYED


EVER = [
    {"examples": 595, "noise": 0.03494, "width": 6},
    {"examples": 674, "noise": 0.2699, "width": 8},
    {"examples": 463, "noise": 0.0, "width": 6},
]
PLAYED = [2780, 292, 139]


def test_a_value_does_not_depend_on_what_else_varies():
    more = varied(lr=Span(0.01, 0.1, "log"), budget=Span(2, 8))
    for number in range(50):
        assert more.varies.variation(number).drawn.items() >= (
            FAMILY.varies.variation(number).drawn.items()
        )
    examples = replace(FAMILY.varies, noise=None, width=None, build_host=None)
    for number in range(50):
        assert examples.variation(number).examples == FAMILY.varies.variation(number).examples


def test_a_span_of_counts_gives_each_count_alike():
    variety = Variety(3000, depth=Span(2, 4), build_host=build)
    depths = [variety.variation(number).depth for number in range(3000)]
    assert all(900 < depths.count(depth) < 1100 for depth in (2, 3, 4))
    assert all(isinstance(depth, int) for depth in depths)


def test_where_hosts_are_alike_nothing_is_drawn():
    digits = get_task("digits")
    pool = digits.load(None)
    assert variation_of(digits, 1) is None
    host = for_host(digits, 1, pool)
    assert host.task is digits
    assert host.splits is pool
    assert host.variation is None


# -- the task of a host ----------------------------------------------------------------------------


def test_a_hosts_task_has_what_it_drew():
    family = varied(
        lr=Span(0.01, 0.1, "log"),
        budget=Span(2, 8),
        depth=Span(2, 3),
        build_host=build,
    )
    for seed in range(10):
        host = for_host(family, seed, POOL)
        drawn = host.variation
        assert (host.task.lr, host.task.budget, host.task.varies) == (drawn.lr, drawn.budget, None)
        blocks = host.task.build_host().blocks
        assert (len(blocks), blocks[0][0].out_channels) == (drawn.depth, drawn.width)
        assert len(host.splits.train) == drawn.examples
        assert len(host.splits.validation) == max(LEAST_HELD_OUT, round(drawn.examples / 4))


def test_equal_hosts_are_priced_once():
    first, second = (concrete(FAMILY, FAMILY.varies.variation(number)) for number in (0, 7))
    wide = replace(FAMILY.varies.variation(0), width=8)
    assert concrete(FAMILY, wide).build_host == concrete(FAMILY, replace(wide)).build_host
    is_equal = FAMILY.varies.variation(0).width == FAMILY.varies.variation(7).width
    assert (first.build_host == second.build_host) == is_equal


def test_a_multiple_of_the_rate_is_one_of_every_hosts_rate():
    family = varied(lr=Span.of(0.02, 0.04))
    rates = [for_host(at_rate(family, 0.5), seed, POOL).task.lr for seed in range(8)]
    assert rates == [for_host(family, seed, POOL).task.lr / 2 for seed in range(8)]
    assert at_rate(FAMILY, 0.5).lr == FAMILY.lr / 2


def test_a_setting_can_be_the_same_for_all():
    family = varied(budget=Span(2, 8))
    assert family.varies.fixed("budget") == FAMILY.varies
    assert Variety(9, budget=Span(2, 8)).fixed("budget") is None
    assert FAMILY.varies.fixed("width").build_host is None


# -- examples and labels ---------------------------------------------------------------------------


def rows_of(split):
    return {image.numpy().tobytes() for image in split.inputs}


def test_a_hosts_examples_are_its_own_and_its_held_out_ones_are_others():
    first, second = (for_host(varied(noise=None), seed, POOL).splits for seed in (1, 2))
    pool = rows_of(POOL.train) | rows_of(POOL.validation)
    assert rows_of(first.train) < pool
    assert rows_of(first.validation) < pool
    assert not rows_of(first.train) & rows_of(first.validation)
    assert rows_of(first.train) != rows_of(second.train)


def labels_by_image(split):
    return {
        image.numpy().tobytes(): int(label)
        for image, label in zip(split.inputs, split.targets, strict=True)
    }


def test_labels_are_wrong_in_both_splits_and_right_in_the_test():
    family = varied(noise=Span(0.3, 0.3))
    right = labels_by_image(POOL.train) | labels_by_image(POOL.validation)
    splits = for_host(family, 3, POOL).splits
    for split in (splits.train, splits.validation):
        wrong = [label != right[image] for image, label in labels_by_image(split).items()]
        assert sum(wrong) == round(0.3 * len(split))
    assert splits.test is POOL.test


def test_without_noise_every_label_is_right():
    right = labels_by_image(POOL.train) | labels_by_image(POOL.validation)
    splits = for_host(varied(noise=None), 3, POOL).splits
    assert labels_by_image(splits.train).items() <= right.items()


def test_the_same_seed_has_the_same_examples_and_the_same_wrong_labels():
    first, second = (for_host(FAMILY, 11, FAMILY.load(None)).splits for _ in range(2))
    for name in ("train", "validation"):
        for values in ("inputs", "targets"):
            pair = [getattr(getattr(splits, name), values) for splits in (first, second)]
            assert torch.equal(*pair)


def test_which_examples_a_host_has_does_not_depend_on_noise():
    quiet = for_host(varied(noise=None), 5, POOL).splits
    noisy = for_host(varied(noise=Span(0.4, 0.4)), 5, POOL).splits
    assert torch.equal(quiet.train.inputs, noisy.train.inputs)
    assert not torch.equal(quiet.train.targets, noisy.train.targets)


def test_held_out_examples_can_be_named():
    splits = for_host(replace(FAMILY, held_out=17), 5, POOL).splits
    assert len(splits.validation) == 17
    rates = Variety(9, lr=Span(0.01, 0.1))
    splits = for_host(replace(FAMILY, held_out=17, varies=rates), 5, POOL).splits
    assert (len(splits.train), len(splits.validation)) == (len(POOL.train), 17)


def test_a_text_varies_in_what_has_nothing_to_do_with_labels():
    text = get_task("python_text")
    pool = text.load(None)
    rates = Variety(9, lr=Span(0.001, 0.002))
    assert for_host(replace(text, varies=rates), 1, pool).splits.train is pool.train
    noisy = replace(text, varies=Variety(9, noise=Span(0.1, 0.2)))
    with pytest.raises(DataError, match="noise"):
        for_host(noisy, 1, pool)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Span(5, 2),
        lambda: Span(0, 2, "log"),
        lambda: Span(1, 2, "square"),
        lambda: Span(1, float("nan")),
        lambda: Span(1, float("inf")),
        lambda: Span("one", 2),
        lambda: Span(1, 2, exact=1.5),
        lambda: Span.of(),
        lambda: Variety(0, noise=Span(0, 0.1)),
        lambda: Variety(2.5, noise=Span(0, 0.1)),
        lambda: Variety(10**9, noise=Span(0, 0.1)),
        lambda: Variety(9),
        lambda: Variety(9, noise=0.3),
        lambda: Variety(9, noise=Span(-0.1, 0.1)),
        lambda: Variety(9, noise=Span(0, 1.5)),
        lambda: Variety(9, lr=Span(0, 1)),
        lambda: Variety(9, budget=Span(0.5, 2)),
        lambda: Variety(9, examples=Span(60.5, 100)),
        lambda: Variety(9, width=Span(2, 4)),
        lambda: Variety(9, width=Span(0, 4), build_host=build),
        lambda: Variety(9, depth=Span(2, 1000), build_host=build),
        lambda: Variety(9, noise=Span(0, 0.1), build_host=build),
        lambda: varied(examples=Span(20, 100)),
        lambda: replace(FAMILY, batch=64),
        lambda: varied(noise=Span(0, 0.95)),
    ],
)
def test_an_absurd_range_is_refused_in_one_line(make):
    with pytest.raises((SettingError, UnknownNameError)) as refusal:
        make()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200


def test_more_examples_than_there_are_are_refused():
    with pytest.raises(SettingError, match=r"2,000 .* 2,500 .* 1,438"):
        check_fit(varied(examples=Span(100, 2000)), POOL)


def test_a_host_that_does_not_fit_is_refused_before_anything_is_drawn():
    colour = varied(build_host=partial(lambda width: build_cnn_host(base_channels=width)))
    with pytest.raises(EsperError, match="digits_varied"):
        check_fit(colour, POOL)
    assert isinstance(POOL, Splits)
