"""What the site adds to docs/: examples and the laboratory, so that no link leaves the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")
PLAIN = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "README.md")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
"""Pages beside the navigation are found by links, not by search."""


def sources() -> dict[str, Path]:
    """Pages beside those of docs/: place on the site -> file of the repository."""
    pages = {f"examples/{path.stem}.md": path for path in sorted(ROOT.glob("examples/*.py"))}
    pages |= {f"lab/{path.name}": path for path in sorted(ROOT.glob("lab/*.md"))}
    return pages | {f"project/{name}": ROOT / name for name in PLAIN}


def text_of(path: Path) -> str:
    """A page's Markdown; a program becomes one block of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return HIDDEN + text
    return f"{HIDDEN}# {path.name}\n\n```python\n{text}```\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages beside the navigation."""
    for place, path in sources().items():
        files.append(File.generated(config, place, content=text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links between files of the repository become links between pages of the site."""
    known = {path.relative_to(ROOT).as_posix(): place for place, path in sources().items()}
    here = known_source(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        place = known.get(path, path.removeprefix("docs/"))
        return f"{found[1]}{posixpath.relpath(place, folder or '.')}{found[3]}"

    return LINK.sub(moved, markdown)


def known_source(place: str) -> str:
    """Where a page of the site is in the repository."""
    path = sources().get(place)
    return path.relative_to(ROOT).as_posix() if path else f"docs/{place}"
