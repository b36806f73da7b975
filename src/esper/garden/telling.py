"""What of an epoch a user wants to read: what changed the network, and hints."""

from collections.abc import Sequence

from esper.leyline.factored_actions import OP_CULL, OP_NAMES
from esper.leyline.stages import SeedStage
from esper.telemetry.events import (
    ActionRefused,
    ActionTaken,
    Event,
    FossilJudged,
    GrowthHint,
    StageChanged,
)

_NEWS = (ActionRefused, ActionTaken, FossilJudged, GrowthHint)


def select_news(events: Sequence[Event]) -> list[Event]:
    """One event for each change: actions, verdicts about fossils, seeds that ended by themselves.

    Measurements, gates and the other stages are left out.
    """
    culled: set[str] = set()
    news: list[Event] = []
    for event in events:
        if isinstance(event, ActionTaken) and event.op == OP_NAMES[OP_CULL]:
            culled.add(event.slot)
        if isinstance(event, StageChanged):
            ended = event.after == SeedStage.CULLED.name and event.slot not in culled
            if ended:
                news.append(event)
        elif isinstance(event, _NEWS):
            news.append(event)
    return news
