"""The configuration:

every mistake is one clear line, nothing is converted, what is written comes back.
"""

import json
import math
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from esper.leyline.configuration import leaves, read_json, read_setting
from esper.leyline.errors import EsperError, SettingError, UnknownNameError
from esper.runtime.tasks.registry import TASKS
from esper.simic.config import TrainingConfig, presets


def refusal(values):
    """The one line that plain values are refused with."""
    with pytest.raises(EsperError) as refused:
        TrainingConfig.of(values, "here")
    text = str(refused.value)
    assert "\n" not in text
    assert not re.search(r"pydantic|validation error|type=|input_value|<class|https:", text)
    return text


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "key", "nearest"),
    [
        ({"hots": 3}, "hots", "hosts"),
        ({"ppos": {}}, "ppos", "ppo"),
        ({"tsk": {"name": "blobs"}}, "tsk", "task"),
        ({"ppo": {"lrr": 1e-3}}, "ppo.lrr", "ppo.lr"),
        ({"task": {"nam": "blobs"}}, "task.nam", "task.name"),
        ({"reward": {"wieghts": {}}}, "reward.wieghts", "reward.weights"),
        ({"telemetry": {"levels": "off"}}, "telemetry.levels", "telemetry.level"),
        ({"lr": 1e-3}, "lr", "ppo.lr"),
        ({"epochs": 9}, "epochs", "task.epochs"),
        ({"task": {"lr": 0.1}}, "task.lr", "ppo.lr"),
    ],
)
def test_an_unknown_key_at_any_depth_is_refused_with_the_nearest_known_one(values, key, nearest):
    assert re.fullmatch(f"here: .*{key!r}.*{nearest!r}.*", refusal(values))


def test_a_key_like_no_other_is_refused_with_the_keys_of_its_section():
    text = refusal({"telemetry": {"zzzzzzzzz": 1}})
    known = "telemetry.level, telemetry.track, telemetry.escalation_rounds"
    assert text == f"here: unknown key 'telemetry.zzzzzzzzz'. Known: {known}."
    assert refusal({"zzz": 1}).endswith("task, reward, ppo, telemetry, imitation.")


@given(st.sampled_from(sorted(leaves(TrainingConfig))), st.data())
def test_a_typo_in_any_key_is_refused_and_the_key_is_offered(key, data):
    place = data.draw(st.integers(key.rfind(".") + 1, len(key) - 1))
    mistyped = key[:place] + "q" + key[place:]
    with pytest.raises(SettingError, match=f"'{mistyped}'") as refused:
        TrainingConfig().with_changes([(mistyped, 1)], "here")
    offered = re.search(r"'([^']*)'\?", str(refused.value))
    assert offered or len(key) < 4
    if offered and len(key) > 6:
        assert offered[1] == key


def test_a_reward_term_is_a_key_too():
    assert re.search("'rnt'.*'rent'", refusal({"reward": {"weights": {"rnt": 1.0}}}))
    assert (
        "loss_beyond_twin"
        not in refusal({"reward": {"weights": {"loss_beyond_twin": 1.0}}}).split("twin'", 1)[1]
    )


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rounds", "12", 'rounds is "12".*integer'),
        ("rounds", True, "rounds is true.*integer"),
        ("rounds", 2.0, "rounds is 2.0.*integer"),
        ("rounds", None, "rounds is null.*integer"),
        ("rounds", 0, "rounds is 0.* 1"),
        ("rounds", math.nan, "rounds is NaN"),
        ("hosts", -3, "hosts is -3.* 1"),
        ("host_pool", 0, "host_pool is 0"),
        ("seed", -1, "seed is -1"),
        ("threads", 0, "threads is 0"),
        ("keep_checkpoints", 0, "keep_checkpoints is 0"),
        ("deterministic", 1, "deterministic is 1.*boolean"),
        ("deterministic", "yes", 'deterministic is "yes"'),
        ("observe_telemetry", None, "observe_telemetry is null"),
        ("out", 3, "out is 3.*string"),
        ("devices", "cpu", 'devices is "cpu".*array'),
        ("devices", [], r"devices is \[\]"),
        ("devices", [1], r"devices.0 is 1.*string$"),
        ("amp", "fp8", "amp is \"fp8\".*'off', 'bf16' or 'fp16'"),
        ("executor", "fast", "executor is \"fast\".*'auto', 'eager' or 'graphed'"),
        ("task", "blobs", 'task is "blobs".*object'),
        ("ppo", [1], r"ppo is \[1\].*object"),
        ("task.name", 3, "task.name is 3"),
        ("task.epochs", 1, "task.epochs is 1.* 2"),
        ("task.epoch_examples", -64, "task.epoch_examples is -64"),
        ("task.held_out", 1, "task.held_out is 1"),
        ("task.batch", 0, "task.batch is 0"),
        ("task.budget", 1.0, "task.budget is 1.0.* 1"),
        ("task.max_seeds", -1, "task.max_seeds is -1"),
        ("task.blueprints", [], r"task.blueprints is \[\]"),
        ("task.slots", ["r0c0", 7], "task.slots.1 is 7"),
        ("reward.family", 3, "reward.family is 3.*string"),
        ("reward.weights", {"rent": math.nan}, "reward.weights.rent is NaN.*finite"),
        ("reward.weights", {"rent": "much"}, 'reward.weights.rent is "much"'),
        ("telemetry.level", "loud", "'off', 'minimal', 'normal' or 'debug'"),
        ("telemetry.escalation_rounds", 0, "telemetry.escalation_rounds is 0"),
        ("ppo.lr", math.nan, "ppo.lr is NaN.*finite"),
        ("ppo.lr", math.inf, "ppo.lr is Infinity"),
        ("ppo.epochs", -1, "ppo.epochs is -1"),
        ("task.budget", 1e308, "task.budget is .* 1000000"),
        ("ppo.hidden_dim", 10**11, "ppo.hidden_dim is .* 16384"),
        ("time_limit", 0, "time_limit is 0.* 0"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_key_value_and_rule(key, value, words):
    *parents, leaf = key.split(".")
    text = refusal({parents[0]: {leaf: value}} if parents else {leaf: value})
    assert re.search(words, text), text
    assert text.startswith("here: ")


def test_several_mistakes_are_told_together():
    text = refusal({"rounds": 0, "hots": 2, "ppo": {"clip": 3.0}})
    assert text.count(";") == 2
    for part in ("rounds is 0", "ppo.clip is 3.0", "'hots'", "'hosts'"):
        assert part in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": {"name": "digit"}}, "unknown task 'digit'. Did you mean 'digits'?"),
        (
            {"reward": {"weights": {"rent": -1.0}}},
            "weight of reward term 'rent' is -1.0; it must be 0 or more",
        ),
        (
            {"ppo": {"lr": 1e-5}},
            "here: ppo: lr_floor is 0.0001, above lr 1e-05; it has to be at most that.",
        ),
        (
            {"ppo": {"compile": "inducter"}},
            "unknown backend of torch.compile 'inducter'. Did you mean 'inductor'?",
        ),
        ({"amp": "fp16"}, "amp fp16 needs CUDA devices"),
        (
            {"amp": "fp16", "devices": ["cuda:0"], "executor": "graphed"},
            "runs on the eager executor only",
        ),
        ({"executor": "graphed"}, "executor graphed needs CUDA devices"),
        (
            {"executor": "graphed", "devices": ["cuda:0", "cpu"]},
            "executor graphed needs CUDA devices",
        ),
    ],
    ids=str,
)
def test_names_and_combinations_that_cannot_be_are_refused(values, words):
    assert re.search(words, refusal(values))


@pytest.mark.parametrize(
    "values",
    [
        {"amp": "fp16", "devices": ["cuda:0"]},
        {"executor": "graphed", "devices": ["cuda:0", "cuda:1"]},
        {"amp": "bf16"},
        {"ppo": {"compile": "eager"}},
        {"task": {"name": "blobs", "batch": None}},
    ],
    ids=str,
)
def test_what_is_possible_is_taken(values):
    assert TrainingConfig.of(values)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("", "JSON"),
        ("rounds: 3", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1, 2]", "list.*object"),
        ("3", "int.*object"),
        ("null", "None.*object"),
        ('{"rounds": NaN}', "rounds is NaN"),
        ('{"rounds": 3, "hots": 2}', "'hots'.*'hosts'"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_no_configuration_is_refused_by_its_name(tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=words) as refused:
        TrainingConfig.from_json_path(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"gone\.json: No such file"):
        read_json(tmp_path / "gone.json")
    with pytest.raises(SettingError, match="directory"):
        read_json(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="JSON"):
        read_json(tmp_path / "binary.json")


def test_a_file_needs_to_name_only_what_it_changes(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"rounds": 3, "ppo": {"lr": 0.002}}')
    config = TrainingConfig.from_json_path(path)
    assert (config.rounds, config.ppo.lr) == (3, 0.002)
    assert config.hosts == TrainingConfig().hosts
    assert config.ppo.gamma == TrainingConfig().ppo.gamma


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_configuration_of_the_task_of_its_name(name):
    config = TrainingConfig.from_preset(name)
    assert config.task.name == name
    assert name in TASKS


def test_the_presets_are_the_ones_that_were_asked_for():
    assert set(presets()) == {
        "digits",
        "cifar10",
        "cifar10_deep",
        "fashion_mnist",
        "tinystories",
        "shakespeare",
        "python_text",
    }


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"preset 'cifar'.*'cifar10'"):
        TrainingConfig.from_preset("cifar")


# -- changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ppo.lr=3e-4", ("ppo.lr", 3e-4)),
        ("rounds=12", ("rounds", 12)),
        ("task.name=blobs", ("task.name", "blobs")),
        ("out=a=b", ("out", "a=b")),
        ('devices=["cpu","cpu"]', ("devices", ["cpu", "cpu"])),
        ("ppo.target_kl=null", ("ppo.target_kl", None)),
        ("deterministic=true", ("deterministic", True)),
        ("task.name=", ("task.name", "")),
        ('task.name="12"', ("task.name", "12")),
    ],
)
def test_a_setting_is_a_key_and_json_where_it_can_be(text, expected):
    assert read_setting(text) == expected


@pytest.mark.parametrize("text", ["rounds", "=3", "", "rounds 3"])
def test_a_setting_without_key_or_sign_is_refused(text):
    with pytest.raises(SettingError, match=r"is not KEY=VALUE"):
        read_setting(text)


def test_changes_reach_every_depth_and_leave_the_rest():
    config = TrainingConfig.from_preset("digits")
    changed = config.with_changes(
        [
            ("rounds", 3),
            ("ppo.lr", 2e-3),
            ("reward.weights.rent", 0.5),
            ("task.blueprints", ["norm"]),
        ],
        "here",
    )
    assert (changed.rounds, changed.ppo.lr, changed.reward.weights) == (3, 2e-3, {"rent": 0.5})
    assert changed.task.blueprints == ("norm",)
    back = [
        ("rounds", 40),
        ("ppo.lr", config.ppo.lr),
        ("reward.weights", {}),
        ("task.blueprints", None),
    ]
    assert changed.with_changes(back, "here") == config
    assert config.rounds == 40


def test_a_later_change_wins():
    assert TrainingConfig().with_changes([("rounds", 3), ("rounds", 4)], "here").rounds == 4


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rounds.more", "'rounds.more'.*'rounds'"),
        ("ppo.lr.peak", "'ppo.lr.peak'.*'ppo.lr'"),
        ("optimiser.lr", "'optimiser.lr'"),
        ("ppo.", "'ppo.'"),
    ],
)
def test_a_change_of_what_is_no_key_is_refused_by_its_source(key, words):
    with pytest.raises(SettingError) as refused:
        TrainingConfig().with_changes([(key, 1)], "the command line")
    assert re.match(f"the command line: .*{words}", str(refused.value))


def test_changes_are_checked_like_everything_else():
    with pytest.raises(SettingError, match=r"amp fp16 .*CUDA"):
        TrainingConfig().with_changes([("amp", "fp16")], "here")


# -- a value ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (None, "rounds"),
        ("ppo", "lr"),
        ("task", "epochs"),
        ("reward", "family"),
        ("telemetry", "level"),
    ],
)
def test_a_configuration_cannot_be_changed_afterwards(section, name):
    config = TrainingConfig()
    owner = getattr(config, section) if section else config
    with pytest.raises(ValidationError, match="frozen"):
        setattr(owner, name, getattr(owner, name))


@pytest.mark.parametrize("name", presets())
def test_a_configuration_comes_back_from_json_as_it_was(name):
    config = TrainingConfig.from_preset(name)
    assert (
        TrainingConfig.of(json.loads(json.dumps(config.model_dump(mode="json"), allow_nan=False)))
        == config
    )


@given(
    lr=st.floats(1e-3, 1e3),
    budget=st.none() | st.floats(1.0, 1e6, exclude_min=True),
    seed=st.integers(0, 2**80),
    out=st.text("abc /.ü'\"", min_size=1),
    weight=st.floats(0, 1e9),
)
def test_every_number_and_name_comes_back_exactly(lr, budget, seed, out, weight):
    values = {
        "ppo": {"lr": lr},
        "task": {"budget": budget},
        "seed": seed,
        "out": out,
        "reward": {"weights": {}},
    }
    config = TrainingConfig.of(values | {"reward": {"weights": {"rent": weight}}})
    assert (config.ppo.lr, config.task.budget, config.seed) == (lr, budget, seed)
    assert TrainingConfig.of(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_a_task_is_built_with_what_was_changed_and_nothing_else():
    plain = TASKS["blobs"]
    built = TrainingConfig.of(
        {"task": {"name": "blobs", "epochs": 5, "blueprints": ["lora"]}}
    ).task.build()
    assert (built.epochs, built.blueprints) == (5, ("lora",))
    assert (built.batch, built.budget, built.load) == (plain.batch, plain.budget, plain.load)


def test_the_page_of_the_configuration_is_what_the_fields_say():
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_config.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), (
        "run: python docs/make_config.py"
    )
    for key in leaves(TrainingConfig):
        assert f"| `{key}` |" in script["page"]()


def test_every_leaf_says_what_it_does():
    assert {key for key, field in leaves(TrainingConfig).items() if not field.description} == set()
    assert {"task.name", "reward.weights", "ppo.lr", "telemetry.level", "rounds"} <= set(
        leaves(TrainingConfig)
    )
