"""The examples run as they stand, on tiny settings."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from cases import with_slow
from simic.team_workers import assert_ended_well, run_ranks

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "own_cnn.py": ["--epochs", "6"],
    "own_rule.py": ["--epochs", "4"],
    "one_host.py": ["--steps", "64"],
    "ddp.py": ["--epochs", "4"],
    "gpt2.py": ["--epochs", "5", "--steps", "4"],
    "continue_trained.py": ["--before", "1", "--more", "6"],
    "trainer_callback.py": ["--epochs", "4", "--texts", "64"],
    "accelerate_loop.py": ["--epochs", "4"],
    "lightning_callback.py": ["--epochs", "5"],
    "deepen_gpt.py": ["--gflops", "6", "--seeds", "1"],
    "pretrain_gpt.py": ["--tokens", "3072", "--rows", "4", "--context", "32", "--width", "32"],
}
NEEDS = {
    "gpt2.py": "transformers",
    "lightning_callback.py": "lightning",
    "one_host.py": "sb3_contrib",
}
NEEDS |= dict.fromkeys(("trainer_callback.py", "accelerate_loop.py"), "accelerate")


def test_every_example_is_listed_here():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SETTINGS)


LONG = ("continue_trained.py", "ddp.py", "deepen_gpt.py", "lightning_callback.py")


@pytest.mark.parametrize("name", with_slow(SETTINGS, LONG))
def test_example_runs_and_plants_a_seed(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])

    def run_it(rank):
        os.chdir(tmp_path)
        sys.argv = [name, *SETTINGS[name]]
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code:
                raise

    # forked, so that torch is not loaded once more
    ended = run_ranks(tmp_path / "said", 1, run_it, seconds=300)
    assert_ended_well(ended)
    signs = ("GERMINATE", "grown minus never", "copies   ", "4 layers taken home")
    assert any(sign in ended[0].said for sign in signs)


@pytest.mark.ranks
def test_two_processes_end_with_one_network_which_is_that_of_one_process(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "ddp.py"))
    ended = [
        *run_ranks(
            tmp_path / "alone", 1, lambda rank: example["main"](6, str(tmp_path / "one.pt"))
        ),
        *run_ranks(tmp_path / "both", 2, lambda rank: example["main"](6, str(tmp_path / "two.pt"))),
    ]
    assert_ended_well(ended)
    _, first, second = (
        re.search(r"[\d,]+ parameters, digest (\w+)$", e.said, re.MULTILINE)[0] for e in ended
    )
    assert first == second
    one, two = (torch.load(tmp_path / name) for name in ("one.pt", "two.pt"))
    assert one.keys() == two.keys()
    assert len(one) > 4
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.ranks
def test_two_processes_pretrain_the_sizes_that_one_process_does(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "pretrain_gpt.py"))
    text = tmp_path / "text.txt"
    text.write_bytes((ROOT / "README.md").read_bytes() * 3)

    def run_it(rank):
        size = os.environ.get("WORLD_SIZE", "1")
        arguments = ["--text", str(text), "--folder", str(tmp_path / size)]
        arguments += SETTINGS["pretrain_gpt.py"]
        example["main"](example["parse"](arguments))

    for size in (1, 2):
        assert_ended_well(run_ranks(tmp_path / f"said-{size}", size, run_it, seconds=200))
    for layers in (2, 3, 4):
        name = f"gpt-{layers}-layers.pt"
        one, two = (torch.load(tmp_path / size / name) for size in ("1", "2"))
        assert one["layers"] == two["layers"] == layers
        assert one["model"].keys() == two["model"].keys()
        model = example["GPT"](layers, 32, 1)
        losses = []
        for saved in (one, two):
            model.load_state_dict(saved["model"])
            tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)
            with torch.no_grad():
                losses.append(float(model(tokens[: 64 * 33].view(64, 33).long())))
        assert losses[0] == pytest.approx(losses[1], abs=0.02)
        assert losses[0] < 5.4  # guessing a byte is 5.55
