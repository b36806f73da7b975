"""Hosts on disk and back, as `esper grow` keeps them."""

import json
import re

from esper.runtime.storing import describe_population, restore_population
from esper.storage.store import NewFile, Store


def _store(folder):
    return Store(folder / "manifest.json", "test", owned=re.compile("host-[a-z0-9-]+"))


def store(population, folder):
    hosts, contents = describe_population(population)
    files = {role: NewFile(f"{role}.safetensors", content) for role, content in contents.items()}
    _store(folder).save({"hosts": hosts}, files)


def restore(population, folder):
    """Facts go through JSON and files through their digests."""
    found = _store(folder).newest()
    restore_population(
        population,
        json.loads(json.dumps(found.facts["hosts"])),
        found.contents,
        folder / "manifest.json",
    )
