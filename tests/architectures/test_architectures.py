"""Thirty architectures of other people: grown, saved, harvested, exported, generated from.

Each fell once where it stands now. The last part of each test runs where esper cannot be imported.
"""

import io
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import esper
from architectures.builders import ARCHITECTURES

pytestmark = pytest.mark.slow
EPOCHS = 8
TESTS = Path(__file__).parents[1]
WITHOUT_ESPER = """
import sys, torch
class NoEsper:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "esper":
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, NoEsper())
torch.set_num_threads(1)
name, folder, tests = sys.argv[1:]
sys.path[:0] = [folder + "/exported", tests]
import grown
from architectures.builders import ARCHITECTURES
case = torch.load(folder + "/case.pt")
networks = [grown.graft(ARCHITECTURES[name].build())]
if case["is_pickled"]:
    networks.append(torch.load(folder + "/plain.pt", weights_only=False))
with torch.no_grad():
    outputs = [network.eval()(**case["batch"])[0] for network in networks]
print(max(float((output - case["expected"]).abs().max()) for output in outputs))
"""


def first_output(model, batch):
    """The first tensor that a model returns for a batch, in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    model.train(was_training)
    return output[0].clone()


def losses(model, batch):
    return model(**batch)[0].float().clamp(-50, 50).flatten(1).pow(2).mean(1)


def grow(architecture, **options):
    """A garden that has trained for some epochs, and the batch that it is looked at with."""
    batch = architecture.examples(4, 0)
    garden = esper.grow(
        architecture.build(),
        example=batch,
        slots=f"{architecture.blocks}.*" if architecture.blocks else "auto",
        settings=esper.GrowthSettings(epochs=EPOCHS, prunes=False),
        **options,
    )
    optimizer = torch.optim.AdamW(garden.parameters(), lr=1e-3)
    garden.attach(optimizer)
    for epoch in range(EPOCHS):
        garden.model.train()
        optimizer.zero_grad()
        losses(garden.model, architecture.examples(4, epoch)).mean().backward()
        optimizer.step()
        garden.step(lambda: losses(garden.model, architecture.examples(4, 900)))
    return garden, batch


def reaches_output(model, name, batch):
    """Whether what a module gives out matters: random weights may drown it in rounding."""
    before = first_output(model, batch)
    hook = model.get_submodule(name).register_forward_hook(lambda *call: call[2] * 1.05)
    after = first_output(model, batch)
    hook.remove()
    return not torch.equal(before, after)


def idle_fossils(garden, bare, batch):
    """Fossils that can be taken out without any change of the output, though it could change."""
    whole = first_output(garden.model, batch)
    idle = []
    for slot in garden.model.ordered_slots:
        if not reaches_output(bare, garden.model.slot_config.modules[slot.slot_id], batch):
            continue
        for number, name in enumerate(slot.fossil_names):
            with garden.model.fossil_off(slot.slot_id, number):
                if torch.equal(whole, first_output(garden.model, batch)):
                    idle.append(f"{name} in {slot.slot_id}")
    return idle


def can_be_pickled(bare, batch):
    """Whether a model can be pickled at all: not what is parametrised, nor with local hooks."""
    first_output(bare, batch)
    try:
        torch.save(bare, io.BytesIO())
    except (RuntimeError, AttributeError):
        return False
    return True


def generation_gap(model):
    """How far the logits of cached generation are from those without a cache."""
    prompt = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(51))
    options = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    model.eval()
    cached, plain = (model.generate(prompt, use_cache=uses, **options) for uses in (True, False))
    gaps = [
        float((one - other).abs().max())
        for one, other in zip(cached.logits, plain.logits, strict=True)
    ]
    return max(gaps)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_grows_and_goes_home_as_the_network_it_was(name, tmp_path):
    architecture = ARCHITECTURES[name]
    garden, batch = grow(architecture)
    assert garden.model.fossilized_seeds
    assert idle_fossils(garden, architecture.build(), batch) == []
    expected = first_output(garden.model, batch)

    loaded = esper.load(garden.save(tmp_path / "saved"), architecture.build())
    assert torch.equal(first_output(loaded.model, batch), expected)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fossils that save_pretrained would drop
        plain = garden.harvest()
    assert torch.equal(first_output(plain, batch), expected)
    if architecture.generates and generation_gap(architecture.build()) < 1e-3:
        assert generation_gap(plain) < 1e-4

    garden.export(tmp_path / "exported")
    is_pickled = can_be_pickled(architecture.build(), batch)
    if is_pickled:
        torch.save(plain, tmp_path / "plain.pt")
    case = {"batch": batch, "expected": expected, "is_pickled": is_pickled}
    torch.save(case, tmp_path / "case.pt")
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_ESPER, name, str(tmp_path), str(TESTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 1e-5
