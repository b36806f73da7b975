"""What a run has spent, and what was last done to each host, folded from its events."""

import pytest

from dashboard.test_view import lived, view_of
from esper.telemetry.events import (
    ActionRefused,
    ActionTaken,
    CostsBooked,
    LedgerClosed,
    RoundBegan,
)

TRAINED = ({"training": 20, "policy": 4}, {"training": 2, "policy": 1}, {"training": 0.5})
LEARNT = ({"learning": 8}, {"learning": 6}, {"learning": 0.25})


@pytest.mark.parametrize("kind", ["ppo", "run"])
def test_what_a_taught_policys_run_spent_is_added_up(kind):
    view = view_of(
        CostsBooked("twins", 0, *TRAINED),
        LedgerClosed(0, 5, 500, *TRAINED),
        LedgerClosed(1, 6, 500, *TRAINED),
        CostsBooked("learning", 0, *LEARNT),
        CostsBooked("learning", 1, *LEARNT),
        kind=kind,
    )
    training = {"flops": 20, "examples": 2, "seconds": 0.5}
    policy = {"flops": 4, "examples": 1, "seconds": 0}
    assert view.spent.pop("twins") == {"training": training, "policy": policy}
    assert view.spent.pop("learning") == {"learning": {"flops": 16, "examples": 12, "seconds": 0.5}}
    episodes = {
        "training": {"flops": 40, "examples": 4, "seconds": 1.0},
        "policy": {"flops": 8, "examples": 2, "seconds": 0},
    }
    assert view.spent == ({"episodes": episodes} if kind == "ppo" else {})
    assert len(view.ledgers) == 2


def test_the_last_action_of_a_host_is_the_newest_one_with_its_outcome():
    first = ActionTaken(0, 1, "GERMINATE", "r0c0", "norm", "linear", module="layer1")
    episode = view_of(RoundBegan(0), first).episodes[0]
    assert episode.last_action == {
        "epoch": 1,
        "op": "GERMINATE",
        "slot": "r0c0",
        "module": "layer1",
        "blueprint": "norm",
        "blend": "linear",
        "refused": None,
    }
    refused = ActionRefused(0, 2, "CULL", "r0c0", "it is too young")
    episode = view_of(RoundBegan(0), first, refused, lived(3)).episodes[0]
    action = episode.last_action
    assert (action["op"], action["epoch"], action["blueprint"]) == ("CULL", 2, None)
    assert action["refused"] == "it is too young"
    view = view_of(RoundBegan(0), first, RoundBegan(1))
    assert view.episodes[0].last_action == {}
