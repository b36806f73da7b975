"""A rule of your own: which seeds are planted, when and where.

On the command line:

    esper --import examples/own_rule.py compare --task digits --policies never thrifty --seeds 3

In your own loop, import this file, then call esper.grow(model, ..., policy="thrifty:share=0.2").
Run alone, this file plays two hosts.
"""

import argparse
from dataclasses import dataclass, replace

import numpy as np

import esper
from esper.leyline.factored_actions import OP_GERMINATE
from esper.runtime.tasks.registry import get_task
from esper.tamiyo.policies import WAIT
from esper.telemetry.events import ActionTaken
from esper.trials.arms import Entry, run_entries


@esper.rule("thrifty")
@dataclass(frozen=True)
class Thrifty:
    """Plant the cheapest seed there is, one at a time.

    Ties: the first slot, then the first blueprint.
    """

    facts: esper.HostFacts  # what is known of the host before it trains: actions, prices, room
    share: float = 0.5  # of the room; other fields are settings, as in thrifty:share=0.2

    def choose(self, masks, reports, memory, signals):
        """Choose one host's next op, slot, blueprint and blend, and what to remember.

        The choice is four indices; the memory is plain data. Masks are arrays of bools: what is
        possible now. A choice that they do not allow is an error.

            op        [4]                 WAIT, GERMINATE, CULL, FOSSILIZE
            slot      [4, slots]          row: the op. Where may it be done?
            blueprint [slots, blueprints] row: the slot. What may be planted there? Index 0 is none.
            blend     [blends]            how

        A row in which nothing is possible has index 0 true, so look at the op first. `reports`
        says how each slot is, `signals` how the host learns; what is not known there is None.
        """
        if signals.rate is not None and signals.rate < 0.5:  # a seed needs a high learning rate
            return WAIT, memory
        if not masks["op"][OP_GERMINATE] or any(report.is_live for report in reports.values()):
            return WAIT, memory
        slots = np.flatnonzero(masks["slot"][OP_GERMINATE])
        places = [
            (int(slot), int(one))
            for slot in slots
            for one in np.flatnonzero(masks["blueprint"][slot])
        ]
        price, place = min((self.facts.cheapest_blend(*place).price, place) for place in places)
        if price > self.share * self.facts.most_room:
            return WAIT, memory
        return self.facts.plant(*place), {**memory, "planted": memory.get("planted", 0) + 1}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=16)
    task = replace(get_task("blobs"), epochs=parser.parse_args().epochs)
    entries = [Entry(name, seed=0, policy=name) for name in ("never", "thrifty:share=0.2")]
    for run in run_entries(task, entries):
        for event in run.events:
            if isinstance(event, ActionTaken):
                print(event)
        result = run.result
        print(f"{result.arm}: {result.final_params} parameters, test {result.test_accuracy:.1%}")
