"""All parts of the campaign, in the order of the table."""

from faults.campaign import kills, power

GROUPS = [*power.GROUPS, *kills.GROUPS]
