"""What README.md shows runs when you paste it, and stays short."""

import re
import subprocess
import sys
from pathlib import Path

from readme_tables import README


def test_the_first_code_block_runs_when_pasted_and_learns(tmp_path: Path):
    """Something is planted, something is removed, and the grown network beats the one alone."""
    block = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "pasted.py").write_text(block, encoding="utf-8")
    command = [sys.executable, "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy = {
        name: float(percent)
        for name, percent in re.findall(r"^([a-z ]+): ([\d.]+)%", done.stdout, re.M)
    }
    assert accuracy.keys() == {"grown", "left alone", "same size from scratch"}
    assert accuracy["grown"] > accuracy["left alone"] + 3
    assert re.findall(r"fossil \S+ \(\S+\) \w+ (kept|removed)", done.stdout).count("removed") == 1
    assert "never judged" not in done.stderr
    changes = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(changes) == 9
    assert README.split("some of the lines:\n\n```\n")[1].splitlines()[0] in changes


def test_the_front_page_fits_on_three_screens():
    assert len(README.splitlines()) <= 150
