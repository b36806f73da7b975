"""What the site adds to docs/: examples, notebooks, the laboratory. So no link leaves the site."""

import base64
import json
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
    pages |= {f"examples/{path.stem}.md": path for path in sorted(ROOT.glob("examples/*.ipynb"))}
    pages |= {f"lab/{path.name}": path for path in sorted(ROOT.glob("lab/*.md"))}
    return pages | {f"project/{name}": ROOT / name for name in PLAIN}


def text_of(path: Path) -> str:
    """A page's Markdown; a program becomes one block of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return notebook_text(path.stem, json.loads(text))
    if path.suffix != ".py":
        return HIDDEN + text
    return f"{HIDDEN}# {path.name}\n\n```python\n{text}```\n"


def notebook_text(name: str, notebook: dict[str, Any]) -> str:
    """A notebook as it was run: words, code, and below each cell what it printed and drew."""
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            printed = "".join(output.get("text", shown.get("text/plain", ""))).rstrip()
            if "image/png" in shown:
                parts.append(f"![what this cell drew]({picture_name(name, number)})")
            elif printed:
                parts.append(f"```text\n{printed}\n```")
    parts.append(f"*This page is the notebook `examples/{name}.ipynb` with its outputs.*")
    return "\n\n".join(parts) + "\n"


def picture_name(name: str, number: int) -> str:
    """The file of what a notebook's cell drew, beside the notebook's page."""
    return f"{name}_{number}.png"


def pictures() -> dict[str, bytes]:
    """What notebooks drew: place on the site -> file."""
    drawn = {}
    for path in sorted(ROOT.glob("examples/*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    place = f"examples/{picture_name(path.stem, number)}"
                    drawn[place] = base64.b64decode("".join(output["data"]["image/png"]))
    return drawn


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages beside the navigation, and what notebooks drew."""
    for place, path in sources().items():
        files.append(File.generated(config, place, content=text_of(path)))
    for place, picture in pictures().items():
        files.append(File.generated(config, place, content=picture))
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
