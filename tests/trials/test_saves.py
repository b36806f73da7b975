"""A growing run on disk:

damage is found and named, the epoch before is used, and nothing else is touched.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from cases import with_slow
from esper.leyline.errors import SaveError
from esper.runtime.population import Population
from esper.storage import runfolder
from esper.storage.claims import lock_of
from esper.telemetry.events import HostRolledBack
from esper.trials import running
from esper.trials.running import KEPT_EPOCHS, EpochSaves, build
from null_sink import NullSink
from simic.tiny_runs import checkpoints_in, events_of, manifest_of
from trials.grown_runs import assert_same_end, configured, grow, open_sink, stopped

STOP = 5


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nobody stopped."""
    config = configured(tmp_path_factory.mktemp("straight"))
    grow(config)
    return config.out


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """The same run, stopped on the way; tests work on copies."""
    config = configured(tmp_path_factory.mktemp("halfway"))
    assert stopped(config, STOP) == STOP
    return config.out


@pytest.fixture
def copied(halfway, tmp_path):
    return shutil.copytree(halfway, tmp_path / "run")


def newest(run, role):
    """A file of the newest epoch that the manifest lists."""
    body = json.loads((run / runfolder.MANIFEST).read_text())["body"]
    return run / runfolder.CHECKPOINTS / body["generations"][-1]["files"][role]["name"]


# -- what is kept ----------------------------------------------------------------------------------


def test_the_newest_epochs_are_kept_and_listed(halfway):
    listed = manifest_of(halfway)["checkpoints"]
    assert [entry["epoch"] for entry in listed] == [STOP - 2, STOP - 1]
    assert len(listed) == KEPT_EPOCHS
    roles = [
        "memory",
        *(f"host-{host}-{part}" for host in (0, 1) for part in ("model", "optimizer", "stream")),
    ]
    names = {Path(name).stem for name in checkpoints_in(halfway)}
    assert names == {
        f"epoch-{epoch:06d}-{role}" for epoch in (STOP - 2, STOP - 1) for role in roles
    }


def test_a_stopped_run_goes_on_to_the_same_end(copied, straight):
    grow(configured(copied), resume=True)
    assert_same_end(copied, straight)


def test_the_end_can_be_reached_twice(copied, straight):
    """Killed while the networks were written, say: the last epoch is decided about once more."""
    for _ in range(2):
        grow(configured(copied), resume=True)
    assert_same_end(copied, straight)


def test_without_a_save_a_resumed_run_begins_at_the_beginning(tmp_path, straight):
    config = configured(tmp_path / "run")
    config.out.mkdir()
    (config.out / runfolder.EVENTS).write_text(
        '{"type": "of a run that was killed in its first epoch"}\n'
    )
    grow(config, resume=True)
    assert_same_end(config.out, straight)


def test_an_epoch_that_was_being_written_does_not_count(copied, straight):
    path = newest(copied, "host-0-model")
    written = f"epoch-{STOP:06d}-host-0-model.safetensors"
    shutil.copy(path, path.with_name(written))
    lock_of(copied / runfolder.MANIFEST).write_text(json.dumps([written]))
    shutil.copy(path, path.with_name(f".new-{'0' * 32}-epoch-{STOP:06d}-host-1-model.safetensors"))
    grow(configured(copied), resume=True)
    assert_same_end(copied, straight)
    assert checkpoints_in(copied) == checkpoints_in(straight)


def test_what_is_not_a_saved_epoch_is_left_alone(copied):
    """Somebody's own files are none of our business, whatever folder they lie in."""
    own = [
        copied / runfolder.CHECKPOINTS / "precious" / "model.pt",
        copied / runfolder.CHECKPOINTS / "notes.txt",
    ]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    grow(configured(copied), resume=True)
    assert [path.read_text() for path in own] == ["mine", "mine"]


# -- damage ----------------------------------------------------------------------------------------


def flip(path):
    """One bit in the last bytes:

    still the right length, and for a tensor file still a readable one.
    """
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


ROLES = ["memory", "host-1-stream", "host-1-model", "host-0-optimizer"]


@pytest.mark.parametrize(
    "damage",
    [flip, Path.unlink, lambda path: path.write_bytes(b"torn")],
    ids=["bit", "gone", "cut"],
)
@pytest.mark.parametrize("role", with_slow(ROLES, {"memory", "host-0-optimizer"}))
def test_a_damaged_newest_epoch_is_named_and_the_one_before_is_used(
    role, damage, copied, straight, capsys
):
    path = newest(copied, role)
    damage(path)
    grow(configured(copied), resume=True)
    told = capsys.readouterr().err
    assert told.startswith(f"esper: {path} is ")
    assert told.count("\n") == 1
    assert_same_end(copied, straight)


def test_where_every_epoch_is_damaged_it_is_an_error_and_nothing_is_begun_anew(copied, capsys):
    for path in (copied / runfolder.CHECKPOINTS).glob("*-memory*"):
        flip(path)
    before = (copied / runfolder.EVENTS).read_bytes()
    with pytest.raises(SaveError, match=r"epoch-000003-memory.safetensors"):
        grow(configured(copied), resume=True)
    assert "epoch-000004-memory.safetensors" in capsys.readouterr().err
    assert (copied / runfolder.EVENTS).read_bytes() == before


def test_a_save_of_other_hosts_is_not_used(copied):
    """As where a configuration was edited by hand."""
    with pytest.raises(SaveError, match=runfolder.MANIFEST):
        grow(configured(copied, seed=5), resume=True)


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), SafetensorError("File too large")]
)
def test_a_full_disk_is_one_clear_error_and_what_was_saved_stays(
    problem, copied, straight, monkeypatch
):
    def fail(*args):
        raise problem

    with monkeypatch.context() as full:
        full.setattr(running, "save_file", fail)
        with pytest.raises(SaveError, match=r"(No space|too large).*--resume"):
            grow(configured(copied), resume=True)
    grow(configured(copied), resume=True)
    assert_same_end(copied, straight)


# -- the governor ----------------------------------------------------------------------------------


def suspect(epochs):
    """A way to evaluate that leaves the second host under suspicion after these epochs."""
    evaluate = Population.evaluate

    def evaluated(population):
        rollbacks = evaluate(population)
        population.governors[1].bad_checks = int(population.runs[1].epoch in epochs)
        return rollbacks

    return evaluated


def test_a_host_under_suspicion_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(Population, "evaluate", suspect({4, 5}))
    config = configured(tmp_path / "run")
    assert stopped(config, 5) == 3
    assert [entry["epoch"] for entry in manifest_of(config.out)["checkpoints"]] == [1, 2]


def test_a_run_that_was_stopped_under_suspicion_goes_on_from_the_last_epoch_above_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Population, "evaluate", suspect({4, 5}))
    whole, cut = configured(tmp_path / "whole"), configured(tmp_path / "cut")
    grow(whole)
    stopped(cut, 5)
    grow(cut, resume=True)
    assert_same_end(cut.out, whole.out)


def breaking(epoch):
    """A way to train in which the first host breaks in this epoch."""
    train = Population.start_epoch

    def trained(population, **options):
        if population.runs[0].epoch == epoch:
            with torch.no_grad():
                next(population.runs[0].model.host.parameters()).fill_(math.nan)
        return train(population, **options)

    return trained


@pytest.mark.parametrize("epochs", with_slow([3, 4, 5], {3, 4}))
def test_a_rollback_is_lived_through_and_resumed(tmp_path, monkeypatch, epochs):
    """Stopped before it, right after it, and later:

    it is told once and the rest of the episode is the same.
    """
    monkeypatch.setattr(Population, "start_epoch", breaking(3))
    whole, cut = configured(tmp_path / "whole"), configured(tmp_path / "cut")
    grow(whole)
    stopped(cut, epochs)
    grow(cut, resume=True)
    (told,) = events_of(cut.out, "HostRolledBack")
    assert (told["host"], told["epoch"]) == (0, 4)
    assert not [e for e in events_of(cut.out, "ActionTaken") if (e["host"], e["epoch"]) == (0, 4)]
    assert_same_end(cut.out, whole.out)


# -- one save --------------------------------------------------------------------------------------


def saved(tmp_path, **changes):
    config = configured(tmp_path / "run", **changes)
    config.out.mkdir()
    episodes, deciders = build(config)
    return EpochSaves(config.out, episodes.population, deciders, NullSink()), config


def live(own):
    own.population.train_epoch()
    own.population.evaluate()


def test_what_had_happened_and_what_was_counted_come_back(tmp_path):
    own, _ = saved(tmp_path)
    live(own)
    save = 3, [[HostRolledBack(0, 3, "training loss is nan")], []], [{"CULLED": 2}, {}]
    own.save(*save)
    assert own.restore() == save
    assert own.epochs == 4


def test_what_policies_remember_comes_back(tmp_path):
    own, _ = saved(tmp_path)
    live(own)
    memories = [
        [{"epoch": 3, "host": 0, "lost": {"r0c1": 2}}],
        (torch.rand(1, 1, 4), torch.rand(1, 1, 4)),
    ]
    for decider, memory in zip(own.deciders, memories, strict=True):
        decider.memory = memory
    own.save(0, [[], []], [{}, {}])
    for decider in own.deciders:
        decider.memory = None
    own.restore()
    assert own.deciders[0].memory == memories[0]
    assert all(torch.equal(*pair) for pair in zip(own.deciders[1].memory, memories[1], strict=True))


def test_a_memory_that_would_come_back_as_another_is_refused(tmp_path):
    own, _ = saved(tmp_path)
    live(own)
    own.deciders[0].memory = [{"epoch": 3, "host": 0, "counts": {0: 1}}]
    with pytest.raises(SaveError, match="memory"):
        own.save(0, [[], []], [{}, {}])
    assert own.store.newest() is None


def test_an_epoch_that_is_lived_again_replaces_its_damaged_save(tmp_path, capsys):
    own, config = saved(tmp_path)
    for epoch in (0, 1, 2):
        live(own)
        own.save(epoch, [[], []], [{}, {}])
    flip(newest(config.out, "memory"))
    assert own.restore()[0] == 1
    own.save(2, [[], []], [{}, {}])
    assert [entry["epoch"] for entry in manifest_of(config.out)["checkpoints"]] == [1, 2]
    assert own.restore()[0] == 2


def test_a_run_of_the_first_format_is_refused_in_one_line(tmp_path):
    """As the first version of Esper left it."""
    own, config = saved(tmp_path)
    entry = {"file": "epoch-000000", "epoch": 0, "sha256": "0" * 64}
    (config.out / runfolder.MANIFEST).write_text(json.dumps({"format": 1, "checkpoints": [entry]}))
    with pytest.raises(SaveError, match=r"^[^\n]*format 1, [^\n]*reads format 3[^\n]*$"):
        own.restore()


def test_saves_are_plain_json_and_tensors(halfway):
    files = [path for path in (halfway / runfolder.CHECKPOINTS).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors"}
    manifest = (halfway / runfolder.MANIFEST).read_text()
    json.loads(manifest, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_events_behind_the_save_are_cut_off_before_they_are_written_again(copied):
    config = configured(copied)
    with open_sink(config) as sink:
        episodes, deciders = build(config)
        EpochSaves(copied, episodes.population, deciders, sink, config.digest()).restore()
    kept = events_of(copied)
    assert {event["epoch"] for event in kept} == set(range(1, STOP))
