"""The seconds of a round run from update to update, so that no part of training is left out of its speed."""

import time

from esper.simic.history import History
from simic.tiny_runs import lines_of, tiny, train

PAUSE = 2.0


def test_a_slow_checkpoint_counts_in_the_round_after_it(tmp_path, monkeypatch):
    save = History.save

    def slow_after_the_first(history, agent, rounds, mean_return):
        save(history, agent, rounds, mean_return)
        if rounds == 1:
            time.sleep(PAUSE)

    monkeypatch.setattr(History, "save", slow_after_the_first)
    config = tiny(tmp_path / "run", rounds=3)
    train(config)
    seconds = [row["seconds"] for row in lines_of(config.out) if row["type"] == "RoundFinished"]
    assert seconds[1] > PAUSE + 0.5 * seconds[2]
