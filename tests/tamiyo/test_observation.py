"""The observation:

its names and order are a contract, its values about one, and what is not known says so.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper.kasmina.blueprints import REGISTRY, SHAM
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import LIVE_STAGES, SeedStage
from esper.tamiyo.observation import (
    BASE_FEATURES,
    BLUEPRINT_FEATURES,
    LARGEST,
    STATE_FEATURES,
    TELEMETRY_FEATURES,
    UNKNOWN,
    feature_names,
    signals_to_features,
)
from tamiyo.observed_episodes import THREE, epoch_signals, reports_of, tracker_after

BASE = [
    *("progress", "lr_share", "train_loss", "held_out_loss", "held_out_loss_change"),
    *("train_accuracy", "held_out_accuracy", "held_out_accuracy_change"),
    *("plateau_epochs", "best_accuracy", "best_loss"),
    *("held_out_loss_0_ago", "held_out_loss_1_ago", "held_out_loss_2_ago"),
    *("held_out_loss_3_ago", "held_out_loss_4_ago"),
    *("held_out_accuracy_0_ago", "held_out_accuracy_1_ago", "held_out_accuracy_2_ago"),
    *("held_out_accuracy_3_ago", "held_out_accuracy_4_ago"),
    *("params_share", "seeds_share"),
]
PER_SLOT = [
    *("occupied", "stage", "alpha", "contribution"),
    *("relative_size", "spatial", "attention_like", "normalising", "depth"),
]
TELEMETRY = [
    *("gradient_norm", "gradient_ratio", "gradient_health", "vanishing", "exploding"),
    *("epochs_in_stage", "seed_age", "contribution_error", "contribution_measured", "greedy_score"),
]
ONE = SlotConfig(("r0c0",))
BLENDING = {"stage": SeedStage.BLENDING, "blueprint_id": "conv_light"}


def seen(*epochs, slots=ONE, scale=1.0, use_telemetry=True, **given_reports):
    """The features by name after these epochs, slots being as the reports say."""
    tracker = tracker_after(*(epochs or [epoch_signals()]), slots=slots, scale=scale)
    reports = reports_of(slots, **given_reports)
    row = signals_to_features(tracker.tracked, reports, slots, scale, use_telemetry=use_telemetry)
    return dict(zip(feature_names(slots, use_telemetry), row.tolist(), strict=True))


def of_slot(features, slot="r0c0"):
    return {
        name.removeprefix(f"{slot}."): value
        for name, value in features.items()
        if name.startswith(f"{slot}.")
    }


def live(**values):
    """The features of a slot with a blending conv_light, except for what is said."""
    return of_slot(seen(r0c0={**BLENDING, **values}))


# -- layout ----------------------------------------------------------------------------------------


def test_three_slots_make_eighty_features_and_fifty_without_telemetry():
    assert len(feature_names(THREE)) == 80
    assert len(feature_names(THREE, use_telemetry=False)) == 50


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_the_width_is_a_base_and_a_share_per_slot(slots):
    config = SlotConfig.for_grid(1, slots)
    for use_telemetry, width in ((True, 23 + 19 * slots), (False, 23 + 9 * slots)):
        assert len(feature_names(config, use_telemetry)) == width
        assert len(seen(slots=config, use_telemetry=use_telemetry)) == width


def test_the_lists_have_the_names_and_the_order_of_the_contract():
    assert (list(BASE_FEATURES), len(BASE)) == (BASE, 23)
    assert (
        [*STATE_FEATURES, *BLUEPRINT_FEATURES],
        len(STATE_FEATURES),
        len(BLUEPRINT_FEATURES),
    ) == (PER_SLOT, 4, 5)
    assert (list(TELEMETRY_FEATURES), len(TELEMETRY)) == (TELEMETRY, 10)


def test_base_comes_first_then_every_slot_then_every_slots_telemetry():
    expected = list(BASE)
    expected += [f"{slot}.{name}" for slot in THREE.slot_ids for name in PER_SLOT]
    expected += [f"{slot}.{name}" for slot in THREE.slot_ids for name in TELEMETRY]
    assert list(feature_names(THREE)) == expected


def test_without_telemetry_it_is_the_same_row_cut_short():
    tracker = tracker_after(epoch_signals(0.5), epoch_signals(0.4))
    reports = reports_of(r0c1={**BLENDING, "seed_gradient_norm": 0.7, "greedy_score": 0.2})
    whole, short = (
        signals_to_features(tracker.tracked, reports, THREE, 1.0, use_telemetry=u)
        for u in (True, False)
    )
    assert np.array_equal(whole[:50], short)
    assert feature_names(THREE)[:50] == feature_names(THREE, use_telemetry=False)
    assert whole[50:].any()


def test_slots_come_in_numeric_order():
    config = SlotConfig(("r0c10", "r0c2"))
    names = feature_names(config)
    assert names.index("r0c2.occupied") < names.index("r0c10.occupied")
    features = seen(
        slots=config, r0c2={**BLENDING, "alpha": 0.25}, r0c10={**BLENDING, "alpha": 0.75}
    )
    assert (features["r0c2.alpha"], features["r0c10.alpha"]) == (0.25, 0.75)


def test_every_slot_is_told_from_its_own_report():
    features = seen(slots=THREE, r0c1={**BLENDING, "alpha": 0.5, "seed_age_epochs": 10})
    assert [features[f"{slot}.occupied"] for slot in THREE.slot_ids] == [0.0, 1.0, 0.0]
    assert [features[f"{slot}.seed_age"] for slot in THREE.slot_ids] == [0.0, 0.5, 0.0]


def test_a_blueprint_of_the_users_own_needs_no_new_width(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    REGISTRY.register("image", "mine", spatial=1.0, attention_like=1.0, depth=2.0)(
        lambda width: nn.Conv2d(width, width, 1)
    )
    features = seen(slots=THREE, r0c2={**BLENDING, "blueprint_id": "mine"})
    assert len(features) == 80
    described = of_slot(features, "r0c2")
    assert [described[name] for name in ("spatial", "attention_like", "normalising")] == [
        1.0,
        1.0,
        0.0,
    ]
    assert described["depth"] == pytest.approx(2 / 3)


# -- the host --------------------------------------------------------------------------------------


def test_progress_rate_and_shares_are_told_as_they_are():
    features = seen(epoch_signals(progress=0.3, lr_share=0.6, params_share=0.7, seeds_share=0.4))
    told = [features[name] for name in ("progress", "lr_share", "params_share", "seeds_share")]
    assert told == pytest.approx([0.3, 0.6, 0.7, 0.4])


def test_losses_are_in_units_of_guessing_up_to_three():
    features = seen(epoch_signals(1.0, train_loss=40.0), scale=2.0)
    told = [
        features[name]
        for name in ("held_out_loss", "train_loss", "best_loss", "held_out_loss_0_ago")
    ]
    assert told == [0.5, 3.0, 0.5, 0.5]


def test_accuracies_are_fractions():
    features = seen(
        epoch_signals(accuracy=0.9, train_accuracy=0.95),
        epoch_signals(accuracy=0.8, train_accuracy=0.97),
    )
    told = [features[name] for name in ("train_accuracy", "held_out_accuracy", "best_accuracy")]
    assert told == pytest.approx([0.97, 0.8, 0.9])


def test_histories_are_newest_first_and_unknown_before_the_beginning():
    features = seen(*(epoch_signals(loss, 1 - loss) for loss in (0.5, 0.4, 0.2)))
    assert [features[f"held_out_loss_{ago}_ago"] for ago in range(5)] == pytest.approx(
        [0.2, 0.4, 0.5, UNKNOWN, UNKNOWN]
    )
    told = [features[f"held_out_accuracy_{ago}_ago"] for ago in range(5)]
    assert told == pytest.approx([0.8, 0.6, 0.5, UNKNOWN, UNKNOWN])


def test_a_change_has_its_sign_and_a_tenth_of_the_scale_is_about_one():
    for scale in (1.0, 5.0):
        features = seen(
            epoch_signals(0.5 * scale, 0.5), epoch_signals(0.4 * scale, 0.6), scale=scale
        )
        assert features["held_out_loss_change"] == pytest.approx(-math.tanh(1))
        assert features["held_out_accuracy_change"] == pytest.approx(math.tanh(1))


def test_twenty_epochs_on_a_plateau_are_one_and_it_stops_there():
    for epochs, expected in ((11, 0.5), (21, 1.0), (41, 1.0)):
        assert seen(*[epoch_signals(0.5)] * epochs)["plateau_epochs"] == expected


def test_what_was_not_measured_of_the_host_is_flagged():
    features = seen(epoch_signals(None, None, train_loss=None, train_accuracy=None))
    flagged = {name for name, value in features.items() if value == UNKNOWN}
    silent = {
        "progress",
        "lr_share",
        "held_out_loss_change",
        "held_out_accuracy_change",
        "plateau_epochs",
    }
    assert flagged == set(BASE) - silent - {"params_share", "seeds_share"}
    assert (features["held_out_loss_change"], features["held_out_accuracy_change"]) == (0.0, 0.0)


# -- slots -----------------------------------------------------------------------------------------

CLOSED = sorted(set(SeedStage) - LIVE_STAGES)
EVERYTHING = {
    "alpha": 0.5,
    "blueprint_id": "conv_light",
    "seed_age_epochs": 4,
    "counterfactual_contribution": 0.2,
    "counterfactual_standard_error": 0.1,
    "seed_gradient_norm": 0.7,
    "seed_gradient_norm_ratio": 0.001,
    "seed_param_count": 10,
    "host_param_count": 100,
}


@pytest.mark.parametrize("stage", CLOSED)
def test_an_empty_slot_is_zero_whatever_its_report_remembers(stage):
    features = of_slot(seen(r0c0={"stage": stage, **EVERYTHING}))
    assert set(features.values()) == {0.0}
    assert len(features) == 19


@pytest.mark.parametrize("stage", CLOSED)
def test_a_place_has_its_score_and_its_time_in_stage_without_a_seed(stage):
    features = of_slot(seen(r0c0={"stage": stage, "epochs_in_stage": 5, "greedy_score": 10.0}))
    assert {name for name, value in features.items() if value} == {
        "greedy_score",
        "epochs_in_stage",
    }
    assert features["epochs_in_stage"] == 0.25
    assert features["greedy_score"] == pytest.approx(math.log(2))


def test_a_live_slot_is_occupied_and_its_stage_a_share_of_the_lifecycle():
    stages = (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.PROBATIONARY)
    told = [live(stage=stage) for stage in stages]
    assert [features["occupied"] for features in told] == [1.0] * 4
    assert [features["stage"] for features in told] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_a_contribution_is_signed_and_in_units_of_the_loss_scale():
    values = {"counterfactual_contribution": -0.2, "counterfactual_standard_error": 0.1}
    features = of_slot(seen(scale=2.0, r0c0={**BLENDING, **values}))
    assert features["contribution"] == pytest.approx(-math.tanh(1.0))
    assert features["contribution_error"] == pytest.approx(math.tanh(0.5))


def test_a_contribution_of_zero_is_told_from_none_by_its_flag():
    measured = live(counterfactual_contribution=0.0, counterfactual_standard_error=0.0)
    unmeasured = live()
    assert (measured.pop("contribution_measured"), unmeasured.pop("contribution_measured")) == (
        1.0,
        0.0,
    )
    assert measured == unmeasured


def test_gradients_and_scores_that_were_not_measured_are_flagged():
    features = live()
    unknown = {name for name, value in features.items() if value == UNKNOWN}
    assert unknown == {"gradient_norm", "gradient_ratio", "gradient_health", "greedy_score"}
    assert (features["vanishing"], features["exploding"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "health", "vanishing", "exploding"),
    [
        (1.0, 1, 0, 0),
        (10.0, 0.5, 0, 0),
        (0.1, 0.5, 0, 0),
        (0.01, 0, 1, 0),
        (100.0, 0, 0, 1),
        (0, 0, 1, 0),
        (1e9, 0, 0, 1),
    ],
)
def test_health_is_one_where_seed_and_host_move_alike(ratio, health, vanishing, exploding):
    features = live(seed_gradient_norm_ratio=ratio)
    told = [features[name] for name in ("gradient_health", "vanishing", "exploding")]
    assert told == pytest.approx([health, vanishing, exploding])


@pytest.mark.parametrize(("value", "expected"), [(0.0, 0.0), (math.e - 1, 1.0), (1e9, 5.0)])
def test_norms_ratios_and_scores_are_logarithms_from_zero_to_five(value, expected):
    features = live(
        seed_gradient_norm=value, seed_gradient_norm_ratio=value, greedy_score=10 * value
    )
    told = [features[name] for name in ("gradient_norm", "gradient_ratio", "greedy_score")]
    assert told == pytest.approx([expected] * 3)


def test_ages_are_shares_of_a_long_time():
    features = live(epochs_in_stage=5, seed_age_epochs=10)
    assert (features["epochs_in_stage"], features["seed_age"]) == (0.25, 0.5)
    features = live(epochs_in_stage=50, seed_age_epochs=100)
    assert (features["epochs_in_stage"], features["seed_age"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("seed", "host", "expected"), [(25, 100, 0.25), (900, 100, 2.0), (5, 0, 2.0), (0, 0, 0.0)]
)
def test_a_seeds_size_is_relative_to_its_hosts(seed, host, expected):
    assert live(seed_param_count=seed, host_param_count=host)["relative_size"] == expected


KNOWN = [
    (kind, name)
    for kind in ("image", "sequence", "vector")
    for name in (*REGISTRY.names(kind), SHAM)
]


@pytest.mark.parametrize(("kind", "name"), KNOWN)
def test_every_blueprint_is_described_by_its_traits(kind, name):
    traits = REGISTRY.get(kind, name).traits
    features = live(kind=kind, blueprint_id=name)
    told = [features[trait] for trait in ("spatial", "attention_like", "normalising", "depth")]
    assert told == pytest.approx(
        [traits.spatial, traits.attention_like, traits.normalising, traits.depth / 3]
    )
    assert max(told) <= 1.0


def test_a_very_deep_blueprint_does_not_leave_the_range(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    REGISTRY.register("image", "tower", depth=60.0)(lambda width: nn.Identity())
    assert live(blueprint_id="tower")["depth"] == 2.0


@pytest.mark.parametrize("wild", ["trait", "loss", "rate"])
def test_no_feature_is_further_from_zero_than_the_largest(monkeypatch, wild):
    """Losses may be below zero, and whoever registers a blueprint may say anything of it."""
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    REGISTRY.register("image", "wild", spatial=1e6, attention_like=-1e6)(
        lambda width: nn.Identity()
    )
    signals = {"loss": epoch_signals(-1e6, train_loss=-1e9), "rate": epoch_signals(lr_share=1e3)}
    name = "wild" if wild == "trait" else "norm"
    features = seen(signals.get(wild, epoch_signals()), r0c0={**BLENDING, "blueprint_id": name})
    assert max(abs(value) for value in features.values()) == LARGEST


# -- any readings ----------------------------------------------------------------------------------

ANY = st.none() | st.floats(0, 1e12) | st.sampled_from([0.0, 1e-300, math.nan, math.inf])
SIGNED = ANY | st.floats(-1e12, 0)


@given(
    st.lists(st.tuples(ANY, ANY), min_size=1, max_size=7),
    st.sampled_from(SeedStage),
    st.tuples(SIGNED, ANY, ANY, ANY, ANY),
    st.integers(0, 10**9),
    st.sampled_from([0.01, 0.7, 5.5]),
)
def test_no_reading_whatever_makes_a_feature_that_is_not_finite_or_beyond_five(
    epochs, stage, metrics, count, scale
):
    names = (
        "counterfactual_contribution counterfactual_standard_error "
        "seed_gradient_norm seed_gradient_norm_ratio"
    )
    values = dict(zip([*names.split(), "greedy_score"], metrics, strict=True))
    values |= {
        "epochs_in_stage": count,
        "seed_age_epochs": count,
        "seed_param_count": count,
        "blueprint_id": "norm",
    }
    epochs = [epoch_signals(loss, accuracy, train_loss=loss) for loss, accuracy in epochs]
    features = seen(*epochs, scale=scale, r0c0={"stage": stage, **values})
    assert all(math.isfinite(value) and abs(value) <= LARGEST for value in features.values())
