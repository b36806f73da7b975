"""Somebody else's policy file is checked before anything is built from it."""

import json
import random
import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from esper.leyline.errors import EsperError, SaveError
from esper.runtime.tasks.registry import get_task
from esper.simic.checkpoints import episodes_of, other_episodes
from esper.simic.ppo.agent import PPOAgent
from esper.tamiyo.policy_files import load_fitting, seal
from esper.tamiyo.policy_files import read as read_policy
from esper.trials.running import build
from faults.commands import CLEAR, DONE, command, run
from faults.damage import WRONG
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
    return (
        build(grown_runs.configured(tmp_path_factory.mktemp("run")))[0]
        .population.runs[0]
        .model.space
    )


def test_a_sound_file_is_a_policy_and_a_learner(parts, space, tmp_path):
    path = written(tmp_path / "p", *parts)
    own, learner = (
        load_fitting(path, space).network.state_dict(),
        PPOAgent.load(path).network.state_dict(),
    )
    for name, value in parts[0].items():
        if name.startswith("network."):
            assert torch.equal(own[name.removeprefix("network.")], value)
            assert torch.equal(learner[name.removeprefix("network.")], value)


def test_one_changed_bit_anywhere_is_refused_or_changes_nothing(parts, tmp_path):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, plain)
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    begin = 8 + int.from_bytes(whole[:8], "little")  # of the tensors, behind the header
    places = [draw.randrange(len(whole)) for _ in range(60)] + [
        draw.randrange(begin) for _ in range(60)
    ]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            found, said = read_policy(path)
        except SaveError:
            refused += 1
            continue
        assert said == plain
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], value) for name, value in tensors.items())
        assert place < begin
    assert refused > 100


def test_a_file_without_its_digest_is_refused(parts, tmp_path):
    tensors, plain = parts
    save_file(tensors, tmp_path / "p", {"esper": json.dumps(plain)})
    with pytest.raises(SaveError, match=r"p was changed .*checksum"):
        read_policy(tmp_path / "p")


@pytest.mark.parametrize(
    "facts", [{"task": wrong} for wrong in WRONG[1:]] + [{"episodes": wrong} for wrong in WRONG[4:]]
)
def test_facts_of_another_type_are_one_error(parts, tmp_path, facts):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "facts": facts})
    with pytest.raises(EsperError, match=str(path)):
        episodes_of(path) if "episodes" in facts else other_episodes(path, get_task("blobs"))


def test_brackets_without_end_are_one_error(parts, tmp_path):
    save_file(parts[0], tmp_path / "p", {"esper": "[" * 200_000})
    with pytest.raises(SaveError, match="checkpoint"):
        read_policy(tmp_path / "p")


@pytest.mark.parametrize(
    "learner", [7, "text", [], {}, *({"config": it} for it in (None, 7, "text", [], {"x": 1}))]
)
def test_a_learner_that_is_none_is_one_error(parts, tmp_path, learner):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "learner": learner})
    with pytest.raises(EsperError, match=str(path)):
        PPOAgent.load(path)


def written(path, tensors, plain):
    path.write_bytes(seal(tensors, plain))
    return path


def few_gigabytes():
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


@pytest.mark.parametrize("width", [16000, 20000, 10**12, -1, 0, 1.5, "128", None, [8]])
def test_a_small_file_that_names_great_widths_takes_no_memory(parts, space, tmp_path, width):
    tensors, plain = parts
    path = written(
        tmp_path / "p", tensors, {**plain, "layout": {**plain["layout"], "hidden_dim": width}}
    )
    with pytest.raises(EsperError, match=str(path)):
        load_fitting(path, space)


def test_the_command_says_so_in_one_line(parts, tmp_path):
    tensors, plain = parts
    path = written(
        tmp_path / "p", tensors, {**plain, "layout": {**plain["layout"], "hidden_dim": 16000}}
    )
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


@pytest.mark.parametrize("kind", [torch.complex64, torch.float64, torch.bool])
def test_tensors_of_another_type_are_one_error(parts, space, tmp_path, kind):
    tensors, plain = parts
    name = next(name for name in tensors if name.startswith("network."))
    path = written(tmp_path / "p", {**tensors, name: tensors[name].to(kind)}, plain)
    with pytest.raises(EsperError, match=f"{name} of {kind}"):
        load_fitting(path, space)


def test_a_policy_that_is_refused_for_its_facts_leaves_no_folder(parts, tmp_path):
    tensors, plain = parts
    path = written(tmp_path / "p", tensors, {**plain, "facts": {"task": "text"}})
    assert run(tmp_path / "process", command("run", tmp_path / "out", "--policy", path))[0] == CLEAR
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_with_its_own_copy_of_a_policy_that_was_damaged_since(parts, tmp_path):
    path = written(tmp_path / "p", *parts)
    asked = command("run", tmp_path / "out", "--policy", path)
    assert run(tmp_path / "process", asked)[0] == DONE
    before = (tmp_path / "out" / "networks" / "host-0" / "weights.safetensors").read_bytes()
    path.write_bytes(path.read_bytes()[:500])
    assert run(tmp_path / "process", [*asked, "--resume"])[0] == DONE
    assert (tmp_path / "out" / "networks" / "host-0" / "weights.safetensors").read_bytes() == before


def test_tensors_that_are_missing_of_another_shape_or_no_numbers_are_one_error(
    parts, space, tmp_path
):
    tensors, plain = parts
    for name in [name for name in tensors if name.startswith("network.")][:6]:
        rest = {other: value for other, value in tensors.items() if other != name}
        broken = tensors[name].double() * float("nan")
        for changed in (rest, {**rest, name: torch.zeros(3, 3, 3)}, {**rest, name: broken}):
            with pytest.raises(EsperError, match=name):
                load_fitting(written(tmp_path / "p", changed, plain), space)
