"""The examples run as they stand, on tiny settings, and stay short enough to read at a glance."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "own_cnn.py": ["--epochs", "6"],
    "gpt2.py": ["--epochs", "5", "--steps", "4"],
    "continue_trained.py": ["--before", "1", "--more", "6"],
    "trainer_callback.py": ["--epochs", "4", "--texts", "64"],
    "lightning_callback.py": ["--epochs", "5"],
}
NEEDS = {"gpt2.py": "transformers", "trainer_callback.py": "accelerate", "lightning_callback.py": "lightning"}


def test_every_example_is_listed_here():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_example_is_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 60


@pytest.mark.parametrize("name", SETTINGS)
def test_example_runs_and_plants_a_seed(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, str(ROOT / "examples" / name), *SETTINGS[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GERMINATE" in done.stdout or "grown minus never" in done.stdout


def test_the_readmes_first_code_block_runs(tmp_path):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    setup = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        return self.head(torch.relu(self.layer2(torch.relu(self.layer1(x)))).mean((2, 3)))
model, images, labels = Net(), torch.randn(64, 1, 8, 8), torch.randint(0, 4, (64,))
def losses():
    return nn.functional.cross_entropy(garden.model(images), labels, reduction="none")
def train_one_epoch(net, optimizer):
    optimizer.zero_grad(); losses().mean().backward(); optimizer.step()
evaluate = losses
"""
    check = "\nassert type(plain) is Net and plain(images).shape == (64, 4) and garden.epoch == 30\n"
    script = tmp_path / "readme.py"
    script.write_text(setup + block + check)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GERMINATE" in done.stdout
