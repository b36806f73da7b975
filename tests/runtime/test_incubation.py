"""The verdict on incubated seeds (gate G2), recorded in both precisions that a CPU has."""

from dataclasses import replace

import pytest

from esper.episodes import Episodes
from esper.leyline.factored_actions import OP_GERMINATE
from esper.leyline.lifecycle import StageLengths
from esper.leyline.stages import SeedStage
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import GateJudged

TASK = replace(get_task("digits"), lengths=StageLengths(training=2))
PLANTED_AFTER = 2
"""Epochs that the host trains alone."""
HOSTS = [0, 1, 2]


def incubate(amp):
    """Every host's gain at the end of its seed's incubation, and the event with the verdict."""
    population = Population(TASK, HOSTS, amp=amp)
    episodes = Episodes(population)
    slots = [run.model.slot("r0c0") for run in population.runs]
    space = population.runs[0].model.space
    planting = (OP_GERMINATE, 0, space.blueprint_index("conv_light"), space.blend_index("linear"))
    happened = []
    for epoch in range(1, PLANTED_AFTER + TASK.lengths.training + 1):
        episodes.train()
        if epoch == PLANTED_AFTER:
            for host in HOSTS:
                episodes.act(host, planting)
        gains = [slot.state.shadow_gain for slot in slots]
        for events in episodes.tick():
            happened += events
    verdicts = {}
    for event in happened:
        if isinstance(event, GateJudged) and event.gate == "G2":
            verdicts[event.host] = event
    return slots, gains, [verdicts[host] for host in HOSTS]


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_the_verdict_on_incubation_is_recorded_in_float32_and_in_bfloat16(amp, record_property):
    slots, gains, verdicts = incubate(amp)
    for slot, gain, verdict in zip(slots, gains, verdicts, strict=True):
        record_property(f"G2 {amp}", f"{gain}: {verdict.verdict}")
        assert verdict.measured == gain.mean != 0
        assert str(gain) in verdict.reason
        assert gain.examples == 215
        is_ahead = gain.mean > gain.standard_error
        assert verdict.verdict == ("passed" if is_ahead else "failed")
        assert slot.state.stage is (SeedStage.BLENDING if is_ahead else SeedStage.CULLED)
    assert [verdict.verdict for verdict in verdicts] == ["failed", "failed", "passed"]
