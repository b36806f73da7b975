"""The task `code`: a corpus that every Python has, cut by file, and known by its digest."""

import sysconfig
from dataclasses import replace

import pytest

from esper.leyline.errors import DataError
from esper.runtime.population import Population
from esper.runtime.splits import Splits
from esper.runtime.tasks import data
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import HostEpoch
from esper.trials.arms import Entry, run_entries
from runtime.clocked import TEXT


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A Python with a few modules and packages, some of them the same."""
    library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    for number in range(60):
        write(library / f"module_{number}.py", f"value = {number}\n" * 40)
        write(packages / f"package_{number % 7}" / f"part_{number}.py", f"other = {number}\n" * 40)
    write(packages / "copied" / "part.py", "value = 3\n" * 40)
    write(packages / "copied" / "empty.py", "")
    write(library / "notes.txt", "not a source")
    paths = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    return library


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def texts_of(splits: Splits):
    parts = splits.train, splits.validation, splits.test.open_for_final_report()
    return [bytes(part.tokens.tolist()) for part in parts]


def test_every_source_is_in_exactly_one_split(installation):
    texts = texts_of(data.load_code(context=16))
    sources = {path.read_bytes() for path in installation.rglob("*.py")} - {b""}
    assert len(sources) == 120
    for source in sources:
        assert sum(text.count(source) for text in texts) == 1
    assert sum(map(len, texts)) == sum(map(len, sources))


def test_the_corpus_is_the_same_wherever_it_lies(installation, tmp_path, monkeypatch):
    first = data.load_code(context=16)
    moved = tmp_path / "elsewhere"
    installation.rename(moved)
    paths = {
        "stdlib": moved,
        "purelib": moved / "site-packages",
        "platlib": moved / "site-packages",
    }
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda: {name: str(path) for name, path in paths.items()}
    )
    second = data.load_code(context=16)
    assert texts_of(first) == texts_of(second)
    assert first.corpus == second.corpus


def test_a_changed_source_is_another_corpus(installation):
    before = data.load_code(context=16).corpus
    assert before.startswith("52,000 bytes in 120 files, ")
    changed = installation / "module_5.py"
    changed.write_text(changed.read_text().replace("5", "6", 1))
    after = data.load_code(context=16).corpus
    assert after.split(" sha256 ")[0] == before.split(" sha256 ")[0]
    assert after != before


def test_the_corpus_has_a_largest_size(installation):
    splits = data.load_code(context=16, size=20_000)
    assert sum(map(len, texts_of(splits))) == 20_000
    assert splits.corpus.startswith("20,000 bytes")


def test_too_few_sources_are_refused(installation):
    with pytest.raises(DataError, match="fewer than"):
        data.load_code(context=16, size=100)


def test_the_real_corpus_is_there():
    splits = get_task("code_tiny").load(None)
    assert splits.corpus.startswith("1,048,576 bytes")
    parts = [
        len(part.tokens)
        for part in (splits.train, splits.validation, splits.test.open_for_final_report())
    ]
    assert sum(parts) == 2**20
    assert min(parts) > 0


@pytest.mark.parametrize(
    ("rule", "copies"),
    [("heuristic:held_out_part=0", 2), ("heuristic:copies=9:held_out_part=0", 6)],
)
def test_the_heuristic_deepens_it_by_copies(rule, copies):
    """From 2 blocks to 4, or, where blocks may be copied again, to the 8 that its budget has room
    for.
    """
    task = replace(TEXT, epochs=20, compute=2.0, prunes=False)
    (run,) = run_entries(task, [Entry("heuristic", 1, rule)])
    assert [name for _, name, _ in run.architecture] == ["copy"] * copies
    sizes = [event.params for event in run.events if isinstance(event, HostEpoch)]
    host, block = sizes[0], sizes[1] - sizes[0]
    assert sizes[:8] == [
        host + block * min(copies, epoch) for epoch in range(8)
    ]  # one per decision
    assert len(run.network.blocks) == 2 + copies
    assert run.result.flops <= Population(task, [1]).runs[0].clock.budget


def test_code_has_room_for_eight_blocks():
    task = get_task("code")
    host, eight = (
        sum(p.numel() for p in build().parameters())
        for build in (task.build_host, task.reference[0])
    )
    block = (eight - host) // 6
    assert eight <= int(task.budget * host) < eight + block
