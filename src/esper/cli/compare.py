"""`esper compare`: arms on the same hosts, and tables and files of the results.

The comparing is elsewhere.
"""

from functools import partial
from typing import Any

import typer
from rich.console import Console

from esper.cli.console import arms_compared, compared_figure, differences, print_json
from esper.cli.options import HOSTS, Asked, options_of
from esper.cli.progress import show_progress
from esper.cli.session import assemble, read_started, stop_on_signals, teller, way_on
from esper.leyline.errors import SettingError
from esper.runtime.splits import require_corpus
from esper.simic.team import code_digest
from esper.storage import runfolder
from esper.storage.files import digest, write_durably
from esper.storage.rows import to_csv
from esper.trials.arms import Stopped
from esper.trials.comparison import Comparison
from esper.trials.config import CompareConfig
from esper.trials.results import summarise

CONFIG = CompareConfig
OPTIONS = options_of(
    "policies",
    "static",
    "seeds",
    *HOSTS.values(),
    "rates",
    "final_of",
    "pretrain",
    "oracle",
    "suite",
)


def play(asked: Asked) -> None:
    """Compare what a command line asks for, and print the tables."""
    config = assemble(asked, "compare", CompareConfig, may_change=("data_root",))
    results = run_compare(config, asked.resume, Console(stderr=asked.as_json))
    if results is None:
        raise typer.Exit(130)
    if asked.as_json:
        print_json(results)
        return
    console = Console()
    console.print(arms_compared(results), differences(results))
    teller(console)(
        f"{config.out}: {runfolder.RESULTS}, {runfolder.RESULTS_TABLE}, {runfolder.FIGURE}"
    )


def run_compare(config: CompareConfig, resume: bool, console: Console) -> dict[str, Any] | None:
    """Compare in `config.out`; the results, or None if it was stopped."""
    values = {"command": "compare", **config.model_dump(mode="json", exclude={"out", "data_root"})}
    values["files"] = {
        name: digest(file.path.resolve())
        for name, file in config.files.items()
        if file.path.is_file()
    }
    values["code"] = code_digest()
    tell = teller(console)
    with runfolder.only_writer(config.out, fresh=not resume):
        saved, splits = config.out / runfolder.CONFIG, config.task.build().load(config.data_root)
        values |= {} if splits.corpus is None else {"corpus": splits.corpus}
        if resume and saved.is_file() and (begun := read_started(config.out, "compare")) != values:
            require_corpus(begun.get("corpus"), splits.corpus, config.out)
            other = (
                "code of Esper"
                if {**begun, "code": values["code"]} == values
                else "settings or files"
            )
            raise SettingError(
                f"{config.out} began with other {other} (see {saved}); choose another --out."
            )
        try:
            with (
                runfolder.begun(config.out, values),
                stop_on_signals() as should_stop,
                show_progress(console) as advance,
            ):
                watch = partial(advance, "epochs of all hosts")
                comparison = Comparison(config, tell, should_stop, splits, watch)
                results = summarise(config, comparison.run())
        except Stopped:
            tell(f"stopped; finished arms are kept. Continue with: {way_on('compare', config.out)}")
            return None
        results |= {"corpus": splits.corpus}
        runfolder.write_json(config.out / runfolder.RESULTS, results)
        write_durably(config.out / runfolder.RESULTS_TABLE, to_csv(results["rows"]).encode())
        write_durably(config.out / runfolder.FIGURE, compared_figure(results).encode())
    return results
