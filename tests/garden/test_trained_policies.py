"""A trained policy's file decides about a model of one's own, as it decides in an episode."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import esper
from esper.episodes import Episodes
from esper.garden.garden import Garden
from esper.leyline.errors import (
    CheckpointMismatchError,
    SaveError,
    SettingError,
    UnknownNameError,
)
from esper.runtime.population import Population
from esper.tamiyo.policy_files import read, seal
from esper.tamiyo.policy_names import Pretrained, parse, read_policy
from esper.tamiyo.readings import GROUPS
from esper.telemetry.events import ActionTaken
from esper.trials.arms import Entry, make_decider, play_epoch, run_entries
from garden.test_processes import in_group, own_rows, values_of
from policy_files import ship, write_policy
from runtime.episodes import BLOBS
from user_models import CNN, grow_cnn, losses_of, random_images, train_epoch

IMAGES, HELD_OUT = random_images(32), random_images(16, seed=2)
IN_A_GARDEN = {"loss", "train_loss"}
"""Groups of readings that the garden below has too."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy") / "one.safetensors")


def grown(policy, **options):
    """A garden around the CNN, whose weights are always the same."""
    torch.manual_seed(0)
    return grow_cnn(policy=policy, host=CNN(), **options)


def play(garden, epochs):
    for epoch in epochs:
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, own_rows(HELD_OUT)), train_loss=0.5)
    return garden


def acts_of(happened):
    return [
        (event.epoch, event.op, event.slot, event.blueprint, event.blend)
        for event in happened
        if isinstance(event, ActionTaken)
    ]


# -- three doors, one policy -----------------------------------------------------------------------


@pytest.mark.parametrize("as_path", [str, lambda path: path], ids=["text", "path"])
def test_a_file_grows_a_model_of_ones_own(file, as_path):
    garden = play(grown(as_path(file)), range(6))
    assert garden.policy_name == str(file)
    assert acts_of(garden.history)
    by_function = play(
        grown(lambda facts: read_policy(file).policy.for_space(facts.space)), range(6)
    )
    assert acts_of(by_function.history) == acts_of(garden.history)


@pytest.mark.parametrize("seed", [1, 4])
def test_the_same_readings_are_decided_alike_in_an_episode_and_in_a_garden(seed, tmp_path):
    task = replace(BLOBS, prunes=False, epochs=14)
    path = write_policy(tmp_path / "p", seed=seed, lacking=set(GROUPS) - IN_A_GARDEN)
    in_run = acts_of(run_entries(task, [Entry("arm", 3, str(path))])[0].events)
    episodes = Episodes(Population(task, [3]))
    decider = make_decider(episodes, 0, str(path))
    own = Population(task, [3])
    host = own.runs[0]
    garden = Garden(host.model, path)
    held_out = host.splits.validation
    there = []

    def losses():
        with torch.no_grad():
            inputs, targets = held_out.gather(torch.arange(len(held_out)))
            return nn.functional.cross_entropy(garden.model(inputs), targets, reduction="none")

    for _ in range(task.epochs - 1):
        there += play_epoch(episodes, [decider])[0]
        own.start_epoch()
        own.finish_epoch()
        reading = episodes.population.runs[0].reading
        garden.step(losses, train_loss=reading.train_loss)
        assert garden.history[-1].epoch == episodes.population.runs[0].epoch
        for here, other in zip(garden.memory, decider.memory, strict=True):
            torch.testing.assert_close(here, other, rtol=1e-3, atol=1e-4)
    assert acts_of(garden.history) == acts_of(there) == in_run
    assert len(in_run) >= 3


def test_a_file_is_an_arm_of_a_comparison_like_a_rule(file):
    runs = run_entries(
        replace(BLOBS, epochs=4), [Entry("one", 1, str(file)), Entry("two", 1, "never")]
    )
    assert acts_of(runs[0].events)
    assert not acts_of(runs[1].events)


# -- the one that ships ----------------------------------------------------------------------------


def test_until_a_policy_ships_the_name_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("esper.tamiyo.policy_names.SHIPPED", tmp_path / "none.safetensors")
    with pytest.raises(SettingError, match=r'no trained policy ships .*"heuristic"'):
        grown("pretrained")


def test_pretrained_is_the_file_of_the_package(monkeypatch, tmp_path):
    path = ship(tmp_path, monkeypatch)
    assert isinstance(parse("pretrained"), Pretrained)
    assert parse("pretrained").path == path
    garden = play(grown("pretrained"), range(6))
    assert garden.policy_name == "pretrained"
    assert acts_of(garden.history) == acts_of(play(grown(path), range(6)).history)
    runs = run_entries(replace(BLOBS, epochs=3), [Entry("arm", 1, "pretrained")])
    assert acts_of(runs[0].events)


def test_a_shipped_policy_that_was_changed_is_refused(monkeypatch, tmp_path):
    path = ship(tmp_path, monkeypatch)
    write_policy(path, seed=2)
    with pytest.raises(SaveError, match="is not the policy that was shipped"):
        grown("pretrained")
    path.with_suffix(".json").write_text("{")
    with pytest.raises(SaveError, match=r"pretrained.json is damaged"):
        grown("pretrained")


def test_no_rule_may_take_the_name():
    with pytest.raises(SettingError, match="pretrained"):
        esper.rule("pretrained")(lambda facts: None)


# -- what does not fit -----------------------------------------------------------------------------


def refused(policy, error, words):
    """The host is refused before anything is planted, and can be grown by another policy."""
    host = CNN()
    with pytest.raises(error, match=words):
        grow_cnn(policy=policy, host=host)
    assert grow_cnn(policy="never", host=host).model.host is host


def test_a_file_of_other_features_is_refused(file, tmp_path):
    tensors, plain = read(file)
    layout = vars(plain["layout"])
    features = ["host.mood", *layout["features"][1:]]
    other = tmp_path / "other.safetensors"
    other.write_bytes(seal(tensors, {**plain, "layout": {**layout, "features": features}}))
    refused(other, CheckpointMismatchError, "reads other features: host.mood")


def test_a_damaged_file_is_refused(file, tmp_path):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(file.read_bytes()[:-9])
    refused(damaged, SaveError, "damaged")


def test_what_is_no_policy_is_refused(tmp_path):
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"weights")
    refused(foreign, SaveError, "is not a checkpoint of a growth policy")
    refused("there-is-none.safetensors", UnknownNameError, "there-is-none")
    refused("search:episodes=10", UnknownNameError, "search")
    refused(7, SettingError, "policy is 7")


# -- saves -----------------------------------------------------------------------------------------


def test_a_saved_garden_continues_with_its_file_and_its_memory(file, tmp_path):
    garden = play(grown(file), range(3))
    folder = garden.save(tmp_path / "save")
    before = [part.clone() for part in garden.memory]
    acts = acts_of(play(garden, range(3, 8)).history)
    loaded = esper.load(folder, CNN())
    assert loaded.policy_digest == garden.policy_digest
    assert all(torch.equal(*pair) for pair in zip(loaded.memory, before, strict=True))
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.9))
    assert acts_of(play(loaded, range(3, 8)).history) == acts
    other = grown(file)
    other.restore(folder)
    assert torch.equal(other.memory[0], before[0])


def test_a_file_that_has_moved_is_still_the_same_policy(file, tmp_path, capsys):
    folder = play(grown(file), range(2)).save(tmp_path / "save")
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(file.read_bytes())
    loaded = esper.load(folder, CNN(), policy=moved)
    assert loaded.memory is not None
    assert capsys.readouterr().err == ""


def test_a_file_that_has_changed_is_refused_and_another_starts_without_memory(tmp_path, capsys):
    path = write_policy(tmp_path / "one.safetensors", seed=1)
    folder = play(grown(path), range(2)).save(tmp_path / "save")
    write_policy(path, seed=2)
    host = CNN()
    for options in ({}, {"policy": path}):
        with pytest.raises(SaveError, match="checksum"):
            esper.load(folder, host, **options)
    with pytest.raises(SaveError, match="checksum"):
        grown(path).restore(folder)
    other = write_policy(tmp_path / "two.safetensors", seed=3)
    loaded = esper.load(folder, host, policy=other)
    assert loaded.memory is None
    assert "starts without its memory" in capsys.readouterr().err
    with pytest.raises(SaveError, match="this garden's policy is"):
        grown(other).restore(folder)


def test_a_rule_is_no_file(file, tmp_path, capsys):
    folder = play(grown("heuristic"), range(2)).save(tmp_path / "save")
    kept = json.loads(next(folder.glob("*.json")).read_text())
    assert "policy_digest" in json.dumps(kept)
    assert esper.load(folder, CNN(), policy=file).memory is None
    assert "starts without its memory" in capsys.readouterr().err


# -- several processes -----------------------------------------------------------------------------


@pytest.mark.ranks
def test_all_ranks_decide_alike_and_say_why(file, tmp_path):
    def live(rank):
        garden = grow_cnn(policy=str(file), host=CNN())
        call = nn.parallel.DistributedDataParallel(garden.model)
        optimizer = garden.model.link.optimizer
        for epoch in range(4):
            torch.manual_seed(epoch)
            garden.model.train()
            for rows in torch.randperm(len(IMAGES)).split(16):
                optimizer.zero_grad()
                losses_of(call, own_rows(IMAGES[rows])).mean().backward()
                optimizer.step()
            garden.step(lambda: losses_of(garden.model, own_rows(HELD_OUT)))
        memory = [part.numpy().tobytes() for part in garden.memory]
        return acts_of(garden.history), memory, garden.why()

    first, second = values_of(tmp_path, in_group(live))
    assert first == second
    assert first[0]


@pytest.mark.ranks
def test_ranks_with_other_files_are_refused(tmp_path):
    def live(rank):
        path = write_policy(tmp_path / f"{rank}.safetensors", seed=rank)
        (tmp_path / f"link-{rank}").mkdir()
        local = tmp_path / f"link-{rank}" / "same.safetensors"
        local.write_bytes(path.read_bytes())
        try:
            grow_cnn(policy=read_policy_as(local, "same"), host=CNN())
        except SettingError as problem:
            return str(problem)
        return None

    for problem in values_of(tmp_path, in_group(live)):
        assert "policy_digest" in problem


def read_policy_as(path, text):
    """The policy of a file under a name that it has on all ranks."""
    return replace(read_policy(path), text=text)


# -- models that no family contains ----------------------------------------------------------------


class UNet(nn.Module):
    """Down, through a bottleneck and up again, with a skip at each size."""

    def __init__(self, width=4):
        super().__init__()
        self.enter = self._block(1, width)
        self.down = self._block(width, 2 * width)
        self.bottom = self._block(2 * width, 2 * width)
        self.up = self._block(4 * width, width)
        self.leave = nn.Conv2d(2 * width, 2, 1)

    @staticmethod
    def _block(inner, outer):
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU())

    def forward(self, images):
        fine = self.enter(images)
        coarse = self.down(nn.functional.max_pool2d(fine, 2))
        deep = self.bottom(coarse)
        up = nn.functional.interpolate(
            self.up(torch.cat([deep, coarse], 1)), size=fine.shape[2:], mode="nearest"
        )
        return self.leave(torch.cat([up, fine], 1))


class Encoder(nn.Module):
    """A transformer encoder that classifies sequences."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        features = self.embed(tokens)
        for layer in self.layers:
            features = layer(features)
        return self.head(features.mean(1))


def grow_anything(model, inputs, targets, policy, epochs=7):
    torch.manual_seed(0)
    garden = esper.grow(model, example=inputs[:2], policy=policy, budget=2.0)
    garden.attach(torch.optim.Adam(garden.parameters(), lr=3e-3))

    def losses():
        by_item = nn.functional.cross_entropy(garden.model(inputs), targets, reduction="none")
        return by_item.flatten(1).mean(1) if by_item.dim() > 1 else by_item

    for _ in range(epochs):
        garden.model.train()
        garden.model.link.optimizer.zero_grad()
        loss = losses().mean()
        loss.backward()
        garden.model.link.optimizer.step()
        garden.step(losses, train_loss=loss.item())
    return garden


@pytest.mark.filterwarnings("ignore:the harvest")
def test_it_grows_a_u_net(file):
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(8, 1, 8, 8, generator=draw)
    garden = grow_anything(UNet(), images, (images[:, 0] > 0).long(), file)
    assert acts_of(garden.history)
    assert "It preferred: " in garden.why()
    assert garden.harvest()(images).shape == (8, 2, 8, 8)


@pytest.mark.filterwarnings("ignore:the harvest")
def test_it_grows_a_transformer_encoder(file):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (8, 6), generator=draw)
    garden = grow_anything(Encoder(), tokens, (tokens[:, 0] > 7).long(), file)
    assert acts_of(garden.history)
    assert "It preferred: " in garden.why()
    assert garden.harvest()(tokens).shape == (8, 2)
