"""What is read back is what was written, for this seed and these settings; else it is said, or made again the same."""

import json
import random
from itertools import islice, product

import pytest
from safetensors.torch import load_file, save_file

from esper.leyline.errors import EsperError, SaveError
from esper.storage import files, runfolder
from esper.storage.store import NewFile, Store
from esper.trials.running import EpochSaves, build
from faults.commands import CLEAR, DONE, command, run
from faults.damage import (
    WRONG,
    change_digit,
    discard,
    flip,
    forge,
    leaves,
    replaced,
    swap,
    truncate,
    zero,
)
from null_sink import NullSink
from simic.tiny_runs import events_of
from trials import grown_runs

KINDS = {"twins": "ppo", "arms": "compare", "pretrained": "compare"}


def results_of(kind, folder):
    """What the folder says in the end, without the wall clock."""
    if kind == "ppo":
        return events_of(folder)
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def forget_results(kind, name, folder):
    """What the damaged files lead to has to be made again."""
    if kind == "ppo":
        discard(folder / "manifest.json")
        discard(folder / "checkpoints")
    elif name == "pretrained":
        discard(folder / "arms")
    discard(folder / "results.json")


def files_in(folder, name, ending=".json"):
    return sorted(path for path in (folder / name).iterdir() if path.suffix == ending)


def swap_two(folder, name):
    """The files of two seeds, or of two arms, with all that belongs to them."""
    first, second = files_in(folder, name)[:2]
    swap(first, second)
    if name == "pretrained":
        tensors = files_in(folder, name, ".safetensors")
        swap(*tensors)
        for manifest, own in zip(
            (first, second), tensors, strict=True
        ):  # a forger would see to it that these agree
            forge(
                manifest,
                lambda body, own=own: body["generations"][0]["files"]["host"].update(name=own.name),
            )


def change_first(damage, ending=".json"):
    return lambda folder, name: damage(files_in(folder, name, ending)[0])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("twins", change_first(change_digit)),
        ("twins", swap_two),
        ("arms", change_first(change_digit)),
        ("arms", swap_two),
        ("pretrained", change_first(flip, ".safetensors")),
        ("pretrained", change_first(zero, ".safetensors")),
        ("pretrained", swap_two),
    ],
)
def test_damage_is_told_or_what_is_damaged_is_made_again(finished, copy_of, tmp_path, name, damage):
    kind = KINDS[name]
    folder = copy_of(kind)
    damage(folder, name)
    forget_results(kind, name, folder)
    verdict, _ = run(tmp_path / "process", command(kind, folder, "--resume"))
    assert verdict == CLEAR or results_of(kind, folder) == results_of(kind, finished(kind))


def test_an_arm_of_a_comparison_with_other_settings_is_not_taken(copy_of, tmp_path):
    folder, other = copy_of("compare"), tmp_path / "other"
    assert (
        run(tmp_path / "process", command("compare", other, "--set", "task.budget=1.5"))[0] == DONE
    )
    for name in ("never-1.json", "heuristic-1.json"):
        (folder / "arms" / name).write_bytes((other / "arms" / name).read_bytes())
    assert run(tmp_path / "process", command("compare", folder, "--resume"))[0] == CLEAR


def test_rows_of_a_resumed_comparison_are_in_the_order_of_an_undisturbed_one(
    finished, copy_of, tmp_path
):
    folder = copy_of("compare")
    for name in ("never-1.json", "heuristic-1.json"):
        (folder / "arms" / name).unlink()
    assert run(tmp_path / "process", command("compare", folder, "--resume"))[0] == DONE
    assert results_of("compare", folder) == results_of("compare", finished("compare"))
    arms = [
        list(json.loads((place / "results.json").read_text())["arms"])
        for place in (folder, finished("compare"))
    ]
    assert arms[0] == arms[1]


# -- a forger who knows how to make checksums ------------------------------------------------------


def test_values_of_another_type_in_a_run_s_epochs_are_one_error(tmp_path):
    """Whatever is changed: a save that is refused, or one that can be used; never another exception."""
    config = grown_runs.configured(tmp_path / "run", hosts=1, task__epochs=4)
    grown_runs.stopped(config, 2)
    manifest = config.out / runfolder.MANIFEST
    whole, draw = manifest.read_text(), random.Random(0)
    body = json.loads(whole)["body"]
    places = [path for path in leaves(body["generations"]) if path[2:3] != ("files",)]
    episodes, deciders = build(config)
    refused = 0
    for path in draw.sample(places, 60):
        changed = replaced(body["generations"], path, draw.choice(WRONG))
        manifest.write_text(whole)
        forge(manifest, lambda body, changed=changed: body.update(generations=changed))
        try:
            EpochSaves(
                config.out, episodes.population, deciders, NullSink(), config.digest()
            ).restore()
        except EsperError:
            refused += 1
    assert refused > 10


PLAN = "schedule:epochs=0+2:places=r0c0.lora+r0c1.lora"


@pytest.mark.parametrize(
    "policy", ["heuristic", "schedule:epochs=2+3", PLAN, "random:epochs=2+3", "sham"]
)
def test_a_forged_memory_of_a_rule_is_one_error(tmp_path, policy):
    """Some of what is wrong shows only decisions later, when the rule has a use for it."""
    config = grown_runs.configured(tmp_path / "run", policy=policy, hosts=1, task__epochs=4)
    grown_runs.stopped(config, 2)
    episodes, (decider,) = build(config)
    EpochSaves(config.out, episodes.population, [decider], NullSink(), config.digest()).restore()
    memory = [{"epoch": 1, "host": 0, "idle": 0, "turn": 1, "done": 0 if policy == "sham" else [0]}]
    refused, view = 0, episodes.population.runs[0].model.view()
    for path, wrong in product(leaves(memory), [*WRONG, 10**30]):
        decider.memory = replaced(memory, path, wrong)
        try:
            for _ in range(3):
                # a plan that nothing changes for would ask for ever
                list(islice(decider.decide(view, lambda: view, True), 2))
        except SaveError:
            refused += 1
    assert refused > 10


def test_a_forged_memory_of_a_network_is_one_error(finished, tmp_path):
    policy = next((finished("ppo") / "checkpoints").iterdir())
    config = grown_runs.configured(tmp_path / "run", policy=str(policy), hosts=1, task__epochs=4)
    grown_runs.stopped(config, 2)
    manifest = config.out / runfolder.MANIFEST
    (path,) = (config.out / runfolder.CHECKPOINTS).glob("epoch-000001-memory*")
    h, c = load_file(path).values()
    for forged in (
        {"0.0": h},
        {"0.0": h[:, :, :1], "0.1": c},
        {"0.0": h.double(), "0.1": c},
        {"0.0": h[0], "0.1": c},
    ):
        save_file({name: value.contiguous() for name, value in forged.items()}, path)
        listed = {"name": path.name, "sha256": files.digest(path)}
        forge(
            manifest,
            lambda body, listed=listed: body["generations"][-1]["files"].update(memory=listed),
        )
        with pytest.raises(SaveError, match=str(manifest)):
            grown_runs.grow(config, resume=True)


def test_values_of_another_type_in_a_comparison_are_one_error(copy_of, tmp_path):
    folder = copy_of("compare")
    for arm, rows in (("never", {"arm": 1}), ("random", [])):
        forge(
            folder / f"arms/{arm}-1.json",
            lambda body, rows=rows: body["generations"][0]["facts"].update(rows=rows),
        )
    assert run(tmp_path / "process", command("compare", folder, "--resume"))[0] == CLEAR


@pytest.mark.parametrize(
    "row",
    [
        {"test_loss": 1e308},
        {"test_loss": True},
        {"test_loss": "1"},
        {"seed": 1e308},
        {"arm": "\ud800"},
    ],
)
def test_a_number_of_a_comparison_that_nobody_measured_is_one_error(copy_of, tmp_path, row):
    folder = copy_of("compare")
    for manifest in files_in(folder, "arms"):
        forge(
            manifest,
            lambda body: [own.update(row) for own in body["generations"][0]["facts"]["rows"]],
        )
    assert run(tmp_path / "process", command("compare", folder, "--resume"))[0] == CLEAR


@pytest.mark.parametrize("name", ["\ud800x", "\x1b[31mred", "a\nb"])
def test_a_file_is_never_called_what_cannot_be_printed(tmp_path, name):
    store = Store(tmp_path / "manifest.json", "thing")
    store.save({}, {"host": NewFile("host.bin", b"content")})
    forge(store.manifest, lambda body: body["generations"][0]["files"]["host"].update(name=name))
    with pytest.raises(SaveError, match=r"^[ -~]*plain file[ -~]*$"):
        store.newest()


def test_what_a_manifest_holds_of_a_wrong_type_is_told_in_one_line(tmp_path):
    store = Store(tmp_path / "manifest.json", "thing")
    store.save({})
    forge(store.manifest, lambda body: body["generations"][0].update(number="x", files=5))
    with pytest.raises(SaveError, match=r"^[^\n]*manifest\.json[^\n]*$"):
        store.newest()


def test_a_trained_host_of_another_shape_is_one_error(copy_of, tmp_path):
    folder = copy_of("compare")
    path = folder / "pretrained/seed-0.safetensors"
    save_file({name: value.flatten()[:1].clone() for name, value in load_file(path).items()}, path)
    digest = files.digest(path)
    forge(
        path.with_suffix(".json"),
        lambda body: body["generations"][0]["files"]["host"].update(sha256=digest),
    )
    discard(folder / "arms")
    assert run(tmp_path / "process", command("compare", folder, "--resume"))[0] == CLEAR


def test_a_file_that_is_too_large_to_be_ours_is_not_read_whole(tmp_path, monkeypatch):
    store = Store(tmp_path / "manifest.json", "thing")
    store.save({"text": "x" * 1000})
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    with pytest.raises(SaveError, match="large"):
        store.newest()


@pytest.mark.parametrize("damage", [truncate, flip])
def test_what_a_run_was_started_with_is_not_taken_from_a_damaged_file(copy_of, tmp_path, damage):
    folder = copy_of("run")
    damage(folder / "config.json")
    assert run(tmp_path / "process", command("run", folder, "--resume"))[0] == CLEAR
