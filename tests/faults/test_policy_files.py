"""Somebody else's policy file is checked before anything is built from it."""

import json
import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from esper.leyline.errors import EsperError
from esper.simic.checkpoints import load_fitting, read_agent
from esper.trials.running import build
from faults.commands import CLEAR, command, run
from trials import grown_runs


@pytest.fixture(scope="module")
def parts(finished):
    """Tensors and plain data of a checkpoint."""
    path = next((finished("ppo") / "checkpoints").iterdir())
    with safe_open(path, "pt") as file:
        plain = json.loads(file.metadata()["esper"])
        return {name: file.get_tensor(name) for name in file.keys()}, plain  # noqa: SIM118  # no mapping


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """Slots and blueprints that the policy was trained for."""
    return build(grown_runs.configured(tmp_path_factory.mktemp("run")))[0].population.runs[0].model.space


def test_a_sound_file_is_a_policy_and_a_learner(parts, space, tmp_path):
    path = written(tmp_path / "p", *parts)
    own, learner = load_fitting(path, space).network.state_dict(), read_agent(path).network.state_dict()
    for name, value in parts[0].items():
        if name.startswith("network."):
            assert torch.equal(own[name.removeprefix("network.")], value)
            assert torch.equal(learner[name.removeprefix("network.")], value)


@pytest.mark.parametrize("learner", [7, "text", [], {}, *({"config": it} for it in (None, 7, "text", [], {"x": 1}))])
def test_a_learner_that_is_none_is_one_error(parts, tmp_path, learner):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "learner": learner})
    with pytest.raises(EsperError, match=str(path)):
        read_agent(path)


def written(path, tensors, plain):
    save_file(tensors, path, {"esper": json.dumps(plain)})
    return path


def few_gigabytes():
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


@pytest.mark.parametrize("width", [16000, 20000, 10**12, -1, 0, 1.5, "128", None, [8]])
def test_a_small_file_that_names_great_widths_takes_no_memory(parts, space, tmp_path, width):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "layout": {**plain["layout"], "hidden_dim": width}})
    with pytest.raises(EsperError, match=str(path)):
        load_fitting(path, space)


def test_the_command_says_so_in_one_line(parts, tmp_path):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "layout": {**plain["layout"], "hidden_dim": 16000}})
    asked = command("run", tmp_path / "out", "--policy", path)
    assert run(tmp_path / "process", asked, prepare=few_gigabytes)[0] == CLEAR


@pytest.mark.parametrize("key", ["features", "slots", "blueprints", "blends", "head_dim"])
@pytest.mark.parametrize("value", [None, 7, "text", [1], [None], {"key": 1}, ["x"] * 1000])
def test_a_layout_that_is_none_is_one_error(parts, space, tmp_path, key, value):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "layout": {**plain["layout"], key: value}})
    with pytest.raises(EsperError, match=str(path)):
        load_fitting(path, space)


@pytest.mark.parametrize("key", ["layout", "counters", "facts"])
@pytest.mark.parametrize("value", [None, 7, [1], "text"])
def test_plain_data_of_another_type_is_one_error(parts, space, tmp_path, key, value):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, key: value})
    with pytest.raises(EsperError, match=str(path)):
        load_fitting(path, space)


def test_tensors_that_are_missing_of_another_shape_or_no_numbers_are_one_error(parts, space, tmp_path):
    tensors, plain = parts
    for name in [name for name in tensors if name.startswith("network.")][:6]:
        rest = {other: value for other, value in tensors.items() if other != name}
        broken = tensors[name].double() * float("nan")
        for changed in (rest, {**rest, name: torch.zeros(3, 3, 3)}, {**rest, name: broken}):
            with pytest.raises(EsperError, match=name):
                load_fitting(written(tmp_path / "p", changed, plain), space)
