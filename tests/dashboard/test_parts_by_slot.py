"""What each slot earned, from the training of a policy to the events and the screens."""

import json

import pytest

from dashboard.test_drawing import text_of
from dashboard.test_payload import read
from esper.dashboard.drawing import Moment, draw_reward
from esper.dashboard.payload import Sent, news
from esper.dashboard.reader import summarise
from esper.dashboard.report import write_report
from simic.tiny_runs import events_of, tiny, train

SLOTS = ("r0c0", "r0c1")
HOSTS, EPOCHS = 3, 8
PARTS = [f"contribution:{slot}" for slot in SLOTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of `esper ppo` with default rewards."""
    config = tiny(
        tmp_path_factory.mktemp("parts") / "run",
        rounds=1,
        seed=1,
        hosts=HOSTS,
        task__epochs=EPOCHS,
        task__epoch_examples=256,
    )
    train(config)
    return config.out


def test_events_have_a_part_for_each_slot(folder):
    paid = [row["reward_parts"] for row in events_of(folder, "HostEpoch") if row["reward_parts"]]
    assert paid
    assert all([name for name in parts if ":" in name] == PARTS for parts in paid)
    (finished,) = events_of(folder, "RoundFinished")
    for name in PARTS:
        mean = sum(parts[name] for parts in paid) / HOSTS
        assert finished["reward_parts"][name] == pytest.approx(mean)
    assert any(parts[name] for parts in paid for name in PARTS), "nothing was paid"


def test_screens_have_a_part_for_each_slot(folder, tmp_path):
    message = news(read(folder), 0, Sent())
    for name in PARTS:
        assert len(message["episode"]["epochs"][f"part.{name}"]) == EPOCHS
        assert len(message["rounds"][f"part.{name}"]) == 1
    reader = read(folder)
    moment = Moment(reader.view, summarise(reader), reader.view.episodes[0])
    drawn = text_of(draw_reward, moment, 60, 9)
    assert all(name in drawn for name in PARTS)
    write_report([folder], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert all(json.dumps(f"part.{name}") in text for name in PARTS)
