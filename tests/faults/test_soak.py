"""A sample of what one process does for long: memory, descriptors and files stay as they are."""

import pytest

from tools.faults import soak
from tools.faults.driver import WORKS


@pytest.mark.parametrize("play", [soak.rounds, soak.saves], ids=["rounds", "saves"])
def test_sixty_in_one_process_leave_it_as_it_was(play, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS_SCALE", "0")
    assert play(None, 0, tmp_path) == {WORKS: 60}


def test_a_descriptor_that_stays_open_is_seen(tmp_path):
    def act(note):
        held = []
        for number in range(10):
            held.append(open(tmp_path / "file", "w"))  # noqa: SIM115  # that is the fault
            note(number)

    with pytest.raises(AssertionError, match="descriptors"):
        soak.require_flat(soak.apart(act, tmp_path), "saves")
