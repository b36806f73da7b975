"""Makes docs/pictures/watch_80x24.svg and watch_200x60.svg: python docs/make_pictures_watch.py RUN [PRESSES OF "n"]"""

import asyncio
import re
import sys
from pathlib import Path

from esper.dashboard.reader import RunReader
from esper.dashboard.watch import WatchApp

PICTURES = Path(__file__).parent / "pictures"


async def take(run: Path, size: tuple[int, int], presses: int) -> str:
    """The screen as SVG, in whatever monospaced font the viewer has: none is fetched from elsewhere."""
    app = WatchApp(RunReader(run))
    async with app.run_test(size=size) as pilot:
        while app.note:
            await pilot.pause(0.1)
        await pilot.press(*["n"] * presses)
        await pilot.pause(1)
        svg = app.export_screenshot(title=f"esper watch {run.name}")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    presses = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    PICTURES.mkdir(exist_ok=True)
    for width, height in ((80, 24), (200, 60)):
        svg = asyncio.run(take(Path(sys.argv[1]), (width, height), presses))
        (PICTURES / f"watch_{width}x{height}.svg").write_text(svg, encoding="utf-8")
