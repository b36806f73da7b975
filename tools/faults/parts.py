"""All parts of the campaign, in the order of the table."""

from tools.faults import (
    browsing,
    cuts,
    damages,
    disks,
    gardens,
    kills,
    pages,
    power,
    settings,
    soak,
)

GROUPS = [
    *power.GROUPS,
    *cuts.GROUPS,
    *kills.GROUPS,
    *damages.GROUPS,
    *gardens.GROUPS,
    *settings.GROUPS,
    *disks.GROUPS,
    *soak.GROUPS,
    *pages.GROUPS,
    *browsing.GROUPS,
]
