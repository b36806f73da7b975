"""Power cuts: every folder that POSIX allows to be left of every writer, and real ext4 images cut at a moment."""

import os
import re
from collections import Counter
from functools import cache

import torch
from safetensors.torch import load, save_file

from dashboard.web_runs import grow_run
from esper.dashboard.report import write_report
from esper.kasmina.exporting import SOURCE, WEIGHTS, export_network
from esper.storage.files import digest
from esper.storage.store import NewFile, Store
from faults import test_exports
from faults.power_cuts import NOTHING, Violation, check, quick_folder, record
from test_power_cuts import Arm, Config, Epochs, Garden, Learner, Listed, Twin, only
from tools.faults import world
from tools.faults.driver import SAME, Group
from user_models import PLANT_FIRST, grow_cnn, walk_to


@cache
def garden_subject():
    return Garden()


@cache
def learner_subject():
    return Learner(world.place() / "learner")


@cache
def epochs_subject():
    return Epochs(world.place() / "epochs")


class Pretrained(Listed):
    """Tensors beside a manifest of their own, as a host that is trained before a comparison."""

    def store(self, folder):
        return Store(
            folder / "seed-0.json",
            "pretrained host",
            owned=re.compile("seed-0"),
            bound_to="settings",
        )

    def save(self, folder, number):
        def write(path):
            save_file({"weight": torch.full((64,), float(number))}, path)

        store = self.store(folder)
        store.newest()
        store.save({"number": number}, {"host": NewFile("seed-0.safetensors", write)})

    def load(self, folder):
        kept = self.store(folder).newest()
        if kept is None:
            return NOTHING
        return only(load(kept.contents["host"]).values(), kept.facts["number"])


class Report(Listed):
    """One page that replaces another."""

    def names(self, folder):
        return {"report.html"}

    def save(self, folder, number):
        run = world.place() / f"told-{number}-{os.getpid()}"
        if not run.exists():
            grow_run(run, policy=f"policy-{number}")
        write_report([run], folder / "report.html")

    def load(self, folder):
        path = folder / "report.html"
        if not path.exists():
            return NOTHING
        text = path.read_text()
        if not text.rstrip().endswith("</html>"):
            raise Violation("half a report")
        return int(re.search(r"policy-(\d+)", text)[1])


class Export:
    """`garden.export` into a folder that holds an older export: the old network, the new one, or a refusal."""

    def __init__(self):
        self.model = walk_to(grow_cnn({0: PLANT_FIRST}, scale=1.0), "FOSSILIZED").model

    def save(self, folder, number):
        with torch.no_grad():
            self.model.host.head.bias.fill_(number)
        export_network(self.model, folder)

    def load(self, folder):
        if not (folder / SOURCE).exists():
            return NOTHING
        try:
            return float(test_exports.grafted(folder).head.bias[0].detach())
        except ValueError as refused:
            if (
                WEIGHTS not in str(refused)
                or digest(folder / WEIGHTS) in (folder / SOURCE).read_text()
            ):
                raise
            return REFUSED


REFUSED = "a clear error"


class Networks(test_exports.Finished):
    """The end of a run: networks, then results."""

    def __init__(self):
        super().__init__(walk_to(grow_cnn({0: PLANT_FIRST}, scale=1.0), "FOSSILIZED").model)


class ExportRun(test_exports.Copied):
    """`esper export`."""

    def __init__(self):
        super().__init__(world.finished("run") / "networks" / "host-0")


def states(make, saves, most, following=True, kills=60, refused=False):
    """A case: two or three saves, the one in the middle killed at a call (none in the first case)."""

    def play(draw, number, place):
        subject, kill = (
            make(),
            {} if number == 0 else {draw.randrange(saves): draw.randint(1, kills)},
        )
        with quick_folder() as folder:
            (folder / "disk").mkdir()
            disk, allowed = record(folder / "disk", subject, saves, kill)
            if refused:
                allowed = {save: known | {REFUSED} for save, known in allowed.items()}
            if kill:  # until then it is as without
                first = 2 * next(iter(kill)) + 2
                disk.moments = [moment for moment in disk.moments if moment[0] >= first]
            return Counter(
                {SAME: check(subject, disk, allowed, folder, saves if following else None, most)}
            )

    return play


GROUPS = [
    Group("power", "garden.save", states(garden_subject, 2, 24), 6),
    Group("power", "checkpoints of esper ppo", states(learner_subject, 3, 64), 8),
    Group("power", "epochs of esper run", states(epochs_subject, 2, 8), 4),
    Group("power", "networks of esper run", states(Networks, 1, 16, following=False), 1),
    Group("power", "arms of esper compare", states(Arm, 3, 64, kills=14), 12),
    Group("power", "pretrained hosts", states(Pretrained, 3, 32, kills=30), 10),
    Group("power", "twins", states(Twin, 3, 64, kills=14), 12),
    Group("power", "config.json and results.json", states(Config, 3, 64, kills=14), 12),
    Group(
        "power",
        "garden.export over an older one",
        states(Export, 2, 24, following=False, refused=True),
        4,
    ),
    Group("power", "esper export", states(ExportRun, 1, 64, following=False), 1),
    Group("power", "esper report", states(Report, 2, 32, kills=14), 4),
]
