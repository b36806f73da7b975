"""Pages say where things are, and they are there; what is generated is what its sources say."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import esper

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("lab/*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(r"^( *)(```+).*?^\1\2$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAV = re.compile(r"^ +- .*?: (\S+\.md)$", re.MULTILINE)
WORDS = 21_500
"""most that the pages may have together, without those that are generated"""


def prose(page):
    """A page without its code."""
    return CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors_of(page):
    """Headings as addresses, as the site makes them and as a repository's page does."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    plain = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles]
    return {re.sub(r"\s", "-", title) for title in plain} & {
        re.sub(r"[-\s]+", "-", title) for title in plain
    }


def links_of(page):
    """What a page links to, without the outside world."""
    return [target for target in LINK.findall(prose(page)) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_and_anchor_of_a_page_is_there(page):
    broken = []
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.is_file() or (anchor and anchor not in anchors_of(place)):
            broken.append(target)
    assert broken == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](b.md) `[c](d.md)` [e](#one-thing) [f](#two)\n")
    assert links_of(page) == ["b.md", "#one-thing", "#two"]
    assert anchors_of(page) == {"one-thing"}


def test_every_page_is_in_the_navigation_once():
    listed = NAV.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    notebooks = [f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.ipynb")]
    assert sorted(listed) == sorted([*notebooks, *(page.name for page in DOCS.glob("*.md"))])


def test_every_public_name_is_on_the_page_of_the_api():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: esper\.(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(set(esper.__all__) - {"__version__"})


def test_pages_that_the_code_names_exist():
    named = set()
    for folder in ("src", "examples", "benchmarks", "tools", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named |= set(re.findall(r"\b((?:docs|lab)/\w+\.(?:md|py))\b", text))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_the_page_of_the_commands_is_what_the_command_says():
    script = runpy.run_path(str(DOCS / "make_commands.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["page"](), "run: python docs/make_commands.py"


def test_pages_stay_short():
    """A page a question: what was measured is in lab/, what is generated does not count."""
    counted = [page for page in DOCS.glob("*.md") if page.name not in ("config.md", "commands.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in counted) <= WORDS


def test_the_five_minutes_run_as_pasted_and_end_with_a_better_network(tmp_path):
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "pasted.py").write_text(block, encoding="utf-8")
    command = [sys.executable, "pasted.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scores = {
        name: float(score) for name, score in re.findall(r"^(\w+): (\d+\.\d)%", done.stdout, re.M)
    }
    assert scores["heuristic"] > scores["never"]
    assert set(re.findall(r"fossil \S+ \(\d\) \w+ (kept|removed)", done.stdout)) == {
        "kept",
        "removed",
    }


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_code_on_a_page_is_python_and_names_what_there_is(page):
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.findall(text):
        ast.parse(textwrap.dedent(block))
    packages = {path.stem for path in (ROOT / "src" / "esper").iterdir()}
    named = set(re.findall(r"\besper\.([a-zA-Z_]\w*)", prose_and_code(text)))
    assert named - set(esper.__all__) - packages == set()
    called = set(re.findall(r"\bgarden\.(\w+)\(", text))
    assert called - set(dir(esper.Garden)) - {"model"} == set()


def prose_and_code(text):
    """A page without what it says of earlier versions."""
    return text.partition("## Moved since")[0]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fits_a_phone_and_asks_nobody_else(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    playwright_api = pytest.importorskip("playwright.sync_api")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    script = runpy.run_path(str(DOCS / "make_pictures_site.py"))
    pages = script["pages_of"](tmp_path)
    assert len(pages) > len(list(DOCS.glob("*.md")))
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//")
    assert [name for name in pages if loaded.search((tmp_path / name).read_text("utf-8"))] == []
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser to look at the pages with")
    with script["served"](tmp_path) as address, playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        outside, wide = script["look"](browser, address, pages, None)
        browser.close()
    assert (outside, wide) == (set(), [])
