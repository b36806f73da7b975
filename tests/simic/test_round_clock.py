"""The seconds of a round run from update to update, so that no part of training is left out of its
speed.
"""

import pytest

from esper.simic import trainer
from esper.simic.checkpoints import History
from simic.tiny_runs import lines_of, tiny, train


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter

    def takes(self, seconds, work):
        def done(*arguments, **options):
            self.now += seconds
            return work(*arguments, **options)

        return done


def test_a_round_takes_its_play_and_the_checkpoint_before_it(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(trainer, "play_round", clock.takes(4.0, trainer.play_round))
    monkeypatch.setattr(History, "save", clock.takes(100.0, History.save))
    config = tiny(tmp_path / "run", rounds=3)
    train(config)
    seconds = [row["seconds"] for row in lines_of(config.out) if row["type"] == "RoundFinished"]
    assert seconds == pytest.approx([4.0, 104.0, 104.0])
