"""Notebooks were run from top to bottom, say what they show, and still run."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

import esper
from test_docs import LINK, anchors_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
BY_STEM = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
GAINED = re.compile(r"^grown minus ([\w ]+): ([+-][\d.]+) ± [\d.]+ points$", re.MULTILINE)
SHARE = re.compile(r"^([\w ]+): ([\d.]+)% of the test digits, [\d,]+ parameters$", re.MULTILINE)

COMMAND = re.compile(r"^!(?:.*\\\n)*.*$", re.MULTILINE)
"""a line for the shell, and the lines that continue it"""
ARM = re.compile(r"^ (never|taught round 10) +([\d.]+)% +[\d.]+ +[\d,]+ ", re.MULTILINE)


def cells_of(path, kind):
    """A notebook's cells of one kind."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def printed(cells):
    """All that cells have printed."""
    texts = []
    for cell in cells:
        for output in cell["outputs"]:
            shown = output.get("data", {})
            texts.append("".join(output.get("text", shown.get("text/plain", ""))))
    return "\n".join(texts)


def conclude(stem, text):
    """What the words of a notebook claim is in its numbers."""
    if stem == "grow_own":
        share = {name: float(value) for name, value in SHARE.findall(text)}
        assert share["grown"] > share["left alone"] + 2
    elif stem == "grow_trained":
        gained = {name: float(value) for name, value in GAINED.findall(text)}
        assert gained.keys() == {"trained on", "as long", "whole"}
        assert min(gained["trained on"], gained["as long"]) > 1
    else:
        accuracy = {name: float(value) for name, value in ARM.findall(text)}
        assert accuracy["taught round 10"] > accuracy["never"] + 20


def test_there_is_a_notebook_for_each_use_and_the_site_lists_it():
    stems = [path.stem for path in NOTEBOOKS]
    assert stems == ["grow_own", "grow_trained", "teach_policy"]
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    cases = (ROOT / "docs/use-cases.md").read_text(encoding="utf-8")
    for stem in stems:
        assert f": examples/{stem}.md\n" in site
        assert f"(../examples/{stem}.ipynb)" in cases


@BY_STEM
def test_a_notebook_was_run_from_top_to_bottom_and_drew_something(path):
    cells = cells_of(path, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"/(?:home|root|tmp|work)/", printed(cells))
    assert path.stat().st_size < 200_000


@BY_STEM
def test_the_words_of_a_notebook_are_true_of_what_it_printed(path):
    conclude(path.stem, printed(cells_of(path, "code")))


@BY_STEM
def test_links_and_names_of_a_notebook_are_there(path):
    for cell in cells_of(path, "markdown"):
        for target in LINK.findall("".join(cell["source"])):
            file, _, anchor = target.partition("#")
            page = (path.parent / file).resolve()
            assert page.is_file(), target
            assert not anchor or anchor in anchors_of(page), target
    for cell in cells_of(path, "code"):
        source = COMMAND.sub("", "".join(cell["source"]))
        ast.parse(source)
        assert set(re.findall(r"\besper\.([a-z]\w*)\(", source)) <= set(esper.__all__)


@pytest.mark.slow
@BY_STEM
def test_a_notebook_runs(path):
    for package in ("nbclient", "ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(package)
    run = runpy.run_path(str(ROOT / "docs/make_notebooks.py"))["run"]
    notebook = run(path)
    conclude(path.stem, printed([cell for cell in notebook.cells if cell.cell_type == "code"]))
