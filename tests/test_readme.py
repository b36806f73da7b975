"""What README.md shows runs when you paste it, and stays short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from readme_tables import README, measured_tables


def test_the_first_code_block_runs_when_pasted_and_learns(tmp_path: Path):
    """The classes cannot be separated without a seed, so an accuracy above guessing is the
    seed's.
    """
    block = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "pasted.py").write_text(block, encoding="utf-8")
    command = [sys.executable, "pasted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(re.search(r"accuracy (\d+\.\d)%", done.stdout)[1]) > 90
    # late pruning has its say: the larger seed does all the work, and a harvest of it is complete
    assert re.findall(r"fossil \S+ \(0\) (\w+) (kept|removed)", done.stdout) == [
        ("mlp_small", "removed"),
        ("mlp", "kept"),
    ]
    assert "never judged" not in done.stderr


def test_there_are_three_tables_of_measurements():
    assert len(measured_tables()) == 3


@pytest.mark.parametrize("table", measured_tables(), ids=lambda table: table[0][0])
def test_a_table_of_measurements_has_at_most_five_rows_and_says_baseline_result_interval_and_n(
    table,
):
    header, *rows = table
    assert header[1:3] == ["baseline", "result"]
    assert header[3] in ("95 %", "range")
    assert header[4] == "n"
    assert len(rows) <= 5
    assert {len(row) for row in rows} <= {5}
