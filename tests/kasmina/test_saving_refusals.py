"""Damaged, foreign and interrupted saves:

a clear error, the fresh model as before, the files as before.
"""

import hashlib
import json
import os
import pickle
from collections import Counter, OrderedDict
from enum import IntEnum

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import REGISTRY, blueprint
from esper.leyline.errors import OptimizerError, SaveError, UnknownNameError
from user_models import (
    CNN,
    MLP,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    script,
    stage_of,
    walk_to,
)

IMAGES = random_images(8)


class StageKind(IntEnum):
    EARLY, LATE = 0, 1


@pytest.fixture
def save(tmp_path):
    """A garden with a live seed and an optimiser that has run, saved."""
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, scale=1.0), "PROBATIONARY")
    losses_of(garden.model, IMAGES).mean().backward()
    garden.model.link.optimizer.step()
    return garden.save(tmp_path / "save")


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def refuse(folder, error, match, host=None, policy="never"):
    """Loading raises, and neither files nor model know of it."""
    host = CNN() if host is None else host
    weights = {name: value.clone() for name, value in host.state_dict().items()}
    modules, files = dict(host.named_modules()), contents(folder)
    with pytest.raises(error, match=match):
        esper.load(folder, host, policy=policy)
    assert contents(folder) == files
    assert not any(module._forward_hooks for module in host.modules())
    assert dict(host.named_modules()) == modules
    assert all(torch.equal(value, weights[name]) for name, value in host.state_dict().items())


def edit(folder, change):
    """Change the manifest's body and make its checksum true again."""
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    change(whole["body"])
    text = json.dumps(whole["body"], sort_keys=True, allow_nan=False)
    path.write_text(json.dumps({**whole, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def facts_of(body):
    return body["generations"][-1]["facts"]


def tensor_file(folder, stem):
    (path,) = folder.glob(f"garden-{stem}*.safetensors")
    return path


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_a_truncated_tensor_file_is_refused(save, stem):
    path = tensor_file(save, stem)
    path.write_bytes(path.read_bytes()[:-100])
    refuse(save, SaveError, f"garden-{stem}.*is truncated or altered")


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_an_altered_tensor_is_refused(save, stem):
    path = tensor_file(save, stem)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refuse(save, SaveError, f"garden-{stem}.*is truncated or altered")


@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_a_missing_tensor_file_is_refused(save, stem):
    tensor_file(save, stem).unlink()
    refuse(save, SaveError, f"garden-{stem}.*is missing")


def test_an_altered_manifest_is_refused(save):
    path = save / "manifest.json"
    path.write_text(path.read_text().replace('"births": 1', '"births": 2'))
    refuse(save, SaveError, "checksum does not match")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"body": {}}', "\xff\xfe"])
def test_a_manifest_that_is_not_ours_is_refused(save, text):
    (save / "manifest.json").write_bytes(text.encode("latin-1"))
    refuse(save, SaveError, "is damaged")


@pytest.mark.parametrize("text", ['{"name": "my web site", "icons": []}', "[1, 2]"])
def test_a_manifest_of_another_program_is_not_written_over(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(SaveError, match="another file and stays as it is: only a list of Esper"):
        grow_cnn().save(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == text


def test_a_folder_without_a_save_is_refused(tmp_path):
    refuse(tmp_path, SaveError, "manifest.json .*garden.save")


@pytest.mark.parametrize("name", ["../{}", "/{}", ".{}", "", "a/{}"])
def test_a_name_in_the_manifest_that_is_no_plain_file_name_is_refused(save, name):
    edit(
        save,
        lambda body: body["generations"][-1]["files"]["model"].update(
            name=name.format("model.safetensors")
        ),
    )
    refuse(save, SaveError, "not a plain file name")


def test_a_link_in_place_of_a_tensor_file_is_refused(save):
    path = tensor_file(save, "model")
    path.rename(save.parent / "elsewhere")
    path.symlink_to(save.parent / "elsewhere")
    refuse(save, SaveError, "garden-model.*cannot be read")


def test_a_newer_format_is_refused_by_its_number(save):
    whole = json.loads((save / "manifest.json").read_text())
    (save / "manifest.json").write_text(json.dumps({**whole, "format": 99}))
    refuse(save, SaveError, "has format 99, .* reads format 3")


def test_a_garden_of_the_first_format_is_refused_in_one_line_and_not_written_over(tmp_path):
    """As the first version of Esper wrote it."""
    body = {
        "format": 1,
        "host": {},
        "network": {},
        "optimizer": None,
        "files": {"model": "model-0.safetensors"},
    }
    text = json.dumps(body, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps({"sha256": digest, "body": body}, indent=1))
    refuse(tmp_path, SaveError, "^[^\n]* format 1, [^\n]*reads format 3[^\n]*$")
    before = contents(tmp_path)
    with pytest.raises(SaveError, match="format 1"):
        grow_cnn().save(tmp_path)
    assert contents(tmp_path) == before


def test_a_file_that_is_not_safetensors_is_refused(save):
    data = pickle.dumps({"weights": 1})
    tensor_file(save, "model").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    edit(save, lambda body: body["generations"][-1]["files"]["model"].update(sha256=digest))
    refuse(save, SaveError, "does not fit together")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: facts_of(body).pop("network"),
        lambda body: facts_of(body)["network"]["slots"]["r0c0"].pop("state"),
        lambda body: facts_of(body)["network"]["slots"]["r0c0"]["state"].update(stage=77),
        lambda body: facts_of(body)["network"]["modules"].update(r0c0="os.system"),
        lambda body: facts_of(body)["extra"].pop("history"),
        lambda body: facts_of(body)["extra"]["history"].append({"type": "Nonsense"}),
    ],
    ids=["no network", "no state", "stage 77", "other module", "no history", "unknown event"],
)
def test_a_manifest_forged_with_a_true_checksum_is_refused(save, change):
    edit(save, change)
    refuse(save, esper.EsperError, ".")


FORGED = {
    "epoch": ["three", -5, None],
    "is_pruned": ["no"],
    "policy": [[]],
    "higher_is_better": ["no"],
    "ledger": [{"phases": 3}],
    "examples": [[1], {"training": "x"}],
    "loss_meter": [[1], {"total": "x", "steps": 0}, {"total": 0.5, "steps": -1}],
    "decay": ["x", 5.0],
    "run": [7],
    "history": [{}],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in FORGED.items() for value in values]
)
def test_a_value_of_another_type_is_refused(save, key, value):
    edit(save, lambda body: facts_of(body)["extra"].update({key: value}))
    refuse(save, SaveError, "does not fit together")
    edit(save, lambda body: facts_of(body)["extra"].pop(key))
    refuse(save, SaveError, "does not fit together")


NO_GROUPS = [
    [3, 3, 3],
    [{"names": 5, "options": {}}] * 3,
    [{"names": [], "options": None}] * 3,
    [{"names": []}] * 3,
]
OPTIMISER = [
    ("peak_rate", "x"),
    ("was_high", 3),
    ("steps", 0.5),
    ("scheduler", 3),
    ("scalars", [1]),
]
OPTIMISER += [("scalars", {"head.weight": 3}), *(("groups", groups) for groups in NO_GROUPS)]


@pytest.mark.parametrize(("key", "value"), OPTIMISER)
def test_an_optimisers_value_of_another_type_is_refused(save, key, value):
    edit(save, lambda body: facts_of(body)["optimizer"].update({key: value}))
    refuse(save, SaveError, "does not fit together")


@pytest.mark.parametrize(
    "change", [{"names": ["nothing"]}, {"options": {"lr": "x"}}, {"options": {"momentum": None}}]
)
def test_an_optimisers_group_that_does_not_fit_is_refused_when_it_is_attached(save, change):
    edit(save, lambda body: facts_of(body)["optimizer"]["groups"][0].update(change))
    garden = esper.load(save, CNN(), policy=script({}))
    with pytest.raises(SaveError, match=r"manifest\.json does not fit together"):
        garden.attach(torch.optim.SGD(garden.parameters(), lr=0.05, momentum=0.9))


# -- other models, blueprints, policies, optimisers ------------------------------------------------


def test_another_model_is_refused_with_what_differs(save):
    refuse(save, SaveError, r"'head.weight' .*\[3, 4\].*\[3, 8\]", CNN(width=8))
    refuse(save, SaveError, "tensors .*absent", MLP())


def test_the_same_model_in_another_precision_is_refused(save):
    refuse(save, SaveError, "tensors .*float32.*float64", CNN().double())


@pytest.fixture
def own_blueprint():
    @blueprint("image", "my_conv")
    def my_conv(channels):
        return nn.Conv2d(channels, channels, 1)

    yield "my_conv"
    del REGISTRY._known["image", "my_conv"]


def test_a_save_with_a_blueprint_that_is_not_registered_is_refused_by_name(tmp_path, own_blueprint):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, blueprints=[own_blueprint]), "BLENDING")
    garden.save(tmp_path)
    kept = REGISTRY._known.pop(("image", own_blueprint))
    try:
        refuse(tmp_path, UnknownNameError, "blueprint 'my_conv'")
    finally:
        REGISTRY._known["image", own_blueprint] = kept


def test_a_blueprint_that_has_changed_since_is_refused(tmp_path, own_blueprint):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}, blueprints=[own_blueprint]), "BLENDING")
    garden.save(tmp_path)
    blueprint("image", own_blueprint, replace=True)(
        lambda channels: nn.Conv2d(channels, channels, 3, padding=1)
    )
    refuse(tmp_path, esper.EsperError, "my_conv|another")


def test_a_policy_of_ones_own_has_to_be_passed_again(save):
    refuse(save, UnknownNameError, "unknown policy", policy=None)


def test_a_policy_of_ones_own_with_the_name_of_a_rule_has_to_be_passed_again_too(tmp_path):
    def heuristic(facts):
        return script({})(facts)

    grow_cnn(policy=heuristic).save(tmp_path)
    refuse(tmp_path, UnknownNameError, r"heuristic\(\)", policy=None)


def test_an_optimizer_of_another_kind_is_refused_when_it_is_attached(save):
    garden = esper.load(save, CNN(), policy=script({}))
    with pytest.raises(OptimizerError, match=r"SGD with 3 .*AdamW"):
        garden.attach(torch.optim.AdamW(garden.parameters()))


def test_after_a_refused_optimizer_the_right_one_gets_its_state(save):
    garden = esper.load(save, CNN(), policy=script({}))
    with pytest.raises(OptimizerError):
        garden.attach(torch.optim.AdamW(garden.parameters()))
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.05, momentum=0.9)
    garden.attach(optimizer)
    assert all(
        "momentum_buffer" in optimizer.state[p] for p in garden.parameters() if p.requires_grad
    )


def test_a_save_after_an_optimizer_was_refused_holds_the_state_that_waits(save, tmp_path):
    garden = esper.load(save, CNN(), policy=script({}))
    with pytest.raises(OptimizerError):
        garden.attach(torch.optim.AdamW(garden.parameters(), lr=0.1))
    garden.save(tmp_path / "again")
    kept = [
        json.loads((place / "manifest.json").read_text())["body"]
        for place in (save, tmp_path / "again")
    ]
    assert facts_of(kept[0])["optimizer"] == facts_of(kept[1])["optimizer"]


def test_an_optimizer_with_other_groups_is_refused(save):
    garden = esper.load(save, CNN(), policy=script({}))
    first, *rest = garden.parameters()
    with pytest.raises(OptimizerError, match=r"SGD with 3 .*SGD with 5"):
        garden.attach(torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1))


SUBCLASSES = [
    {"kind": StageKind.LATE},
    Counter(a=1),
    {"seen": OrderedDict()},
]  # equal to what comes back, and not it


@pytest.mark.parametrize(
    "memory",
    [{"tensor": torch.ones(2)}, {"counts": {0: 1}}, [{"last": (1, 2)}], float("nan"), *SUBCLASSES],
)
def test_memory_that_json_cannot_hold_is_refused_and_the_old_save_stays(memory, tmp_path):
    garden = grow_cnn()
    garden.save(tmp_path)
    before = contents(tmp_path)["manifest.json"]
    garden.memory = memory
    with pytest.raises(SaveError, match="memory"):
        garden.save(tmp_path)
    assert contents(tmp_path)["manifest.json"] == before


# -- crashes and trust -----------------------------------------------------------------------------


@pytest.mark.parametrize("crash_at", ["garden-model", "garden-optimizer", "manifest"])
def test_a_crash_while_saving_leaves_the_old_save(save, monkeypatch, crash_at):
    garden = esper.load(save, CNN(), policy=script({}))
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.05, momentum=0.9))
    garden.step(made_up(garden))
    losses_of(garden.model, IMAGES).mean().backward()
    garden.model.link.optimizer.step()
    move = os.replace

    def crash(source, target):
        if os.path.basename(target).startswith(crash_at):
            raise OSError("the power went out")
        move(source, target)

    old_epoch = garden.epoch - 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(SaveError, match="power"):
            garden.save(save)
    loaded = esper.load(save, CNN(), policy=script({}))
    assert (loaded.epoch, stage_of(loaded)) == (old_epoch, "PROBATIONARY")


def test_saving_again_after_a_crash_works_and_clears_up(save, monkeypatch):
    garden = esper.load(save, CNN(), policy=script({}))
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the power went out"))
        )
        with pytest.raises(SaveError, match="power"):
            garden.save(save)
    garden.save(save)
    assert set(contents(save)) == {
        "manifest.json",
        "garden-model-2.safetensors",
        "garden-optimizer-2.safetensors",
    }


def test_nothing_is_ever_unpickled(save, monkeypatch):
    def refuse_to(*_args, **_options):
        raise AssertionError("a save must not be unpickled")

    for module, name in (
        (pickle, "loads"),
        (pickle, "load"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, refuse_to)
    loaded = esper.load(save, CNN(), policy=script({}))
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    assert stage_of(loaded) == "PROBATIONARY"
