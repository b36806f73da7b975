"""Registries: names that are taken, names that cannot be, and settings that a name carries."""

from collections.abc import Sequence

import pytest

import esper
from esper.leyline.errors import EsperError, NameTakenError, SettingError
from esper.leyline.imports import require_imported
from esper.leyline.registry import read_settings, registering
from esper.runtime.tasks.registry import TASKS


def build(
    *,
    width: int = 1,
    steps: tuple[int, ...] = (),
    names: Sequence[str] | None = None,
    share: float = 0.5,
):
    """Something that has settings of every kind."""


def test_settings_are_read_by_their_types_and_lists_are_joined_by_plus():
    found = read_settings("it", ["width=3", "steps=1+2", "names=a", "share=0.25"], build)
    assert found == {"width": 3, "steps": (1, 2), "names": ["a"], "share": 0.25}


def test_a_setting_without_a_type_has_that_of_its_default():
    assert read_settings("it", ["share=0.25"], lambda facts, share=0.5: None) == {"share": 0.25}


@pytest.mark.parametrize(
    ("part", "said"), [("widht=3", "'widht'.*'width'"), ("width=x", "width of it is 'x'")]
)
def test_a_setting_that_is_wrong_is_named(part, said):
    with pytest.raises(EsperError, match=said):
        read_settings("it", [part], build)


def test_a_setting_that_is_given_twice_is_refused():
    with pytest.raises(SettingError, match=r"^it has share twice, .* Leave one out\.$"):
        read_settings("it", ["share=0.5", "width=3", "share=0.1"], build)


def test_a_name_is_entered_once_unless_one_says_so():
    known = {}
    thing = registering(known, "thing", reserved=("all",))
    assert thing("mine")(build) is build
    with pytest.raises(NameTakenError, match="thing 'mine'"):
        thing("mine")(print)
    assert thing("mine", replace=True)(print) is print
    assert known == {"mine": print}


@pytest.mark.parametrize("name", ["all", "my thing", "a:b", ""])
def test_a_name_that_could_not_be_written_or_means_something_else_is_refused(name):
    with pytest.raises(SettingError, match="thing"):
        registering({}, "thing", reserved=("all",))(name)


@pytest.mark.parametrize("name", ["never", "search", "sham"])
def test_a_rule_does_not_take_the_name_of_a_control_even_if_one_says_so(name):
    with pytest.raises(SettingError, match=name):
        esper.rule(name, replace=True)


@pytest.mark.parametrize(
    "enter",
    [
        lambda: esper.register_task(TASKS["digits"]),
        lambda: esper.rule("heuristic")(build),
        lambda: esper.reward_family("loss", {"rent": 1.0}),
        lambda: esper.reward_term(type("", (), {"__name__": "rent", "__call__": build})()),
    ],
)
def test_what_is_built_in_is_not_replaced_silently(enter):
    with pytest.raises(NameTakenError, match="replace=True"):
        enter()


def test_a_family_of_rewards_has_terms_that_exist():
    with pytest.raises(EsperError, match=r"'rant'.*'rent'"):
        esper.reward_family("mine", {"rant": 1.0})


def test_a_file_that_was_imported_once_is_asked_for_by_name():
    with pytest.raises(SettingError, match=r"--import gone_file\.py"):
        require_imported({"gone_file.py": "0"})
    with pytest.raises(SettingError, match=r"test_registry\.py"):
        require_imported({__name__: "0"})
