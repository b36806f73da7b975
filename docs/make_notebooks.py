"""Runs the notebooks of examples/ and writes what they print and draw into them: python docs/make_notebooks.py [NAME ...]

It needs the extra `slow`. Outputs are kept as they come, without what changes from one run to the next: times, and addresses of objects.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
SHOWN = ("text/plain", "image/png")
"""kinds of output that are kept: what a repository, the site and a terminal can show"""
CLEARED = re.compile(r"[^\n]*(?:\x1b\[2K|\r(?!\n))")
"""a line of a terminal, up to where it was last wiped: a progress bar's"""
CONTROL = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]|\r")
ADDRESS = re.compile(r"^<.* at 0x[0-9a-f]+>$|^<Figure size .*>$")


def run(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of a run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1", "PATH": commands}
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=1800, resources=place).execute()
    tidy(notebook)
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Take out what changes from one run to the next."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = CONTROL.sub("", CLEARED.sub("", output.text))
            if "data" in output:
                output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
                if ADDRESS.match(output.data.get("text/plain", "")):
                    del output.data["text/plain"]


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs in which what was printed in pieces is one text."""
    whole: list[nbformat.NotebookNode] = []
    for output in outputs:
        stream = output.get("name")
        if stream is not None and whole and whole[-1].get("name") == stream:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def main() -> None:
    """Run the notebooks that are named, or all."""
    names = sys.argv[1:]
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            notebook = run(path)
            nbformat.write(notebook, path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
