"""Pictures of the explorer in both themes, taken in Chromium: ``python -m docs.generator.screens [NAME ...]``.

Run it again when a screen looks different.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

FOLDER = Path(__file__).parents[1] / "images" / "explorer"
WIDTH = 1280
SCREENS = {
    "compare": ("compare", 625),
    "rotary": ("rotary?position=1000&pair=12&scaling=yarn&factor=8", 800),
    "model": ("model?model=qwen2.5-7b&to=131072", 800),
    "swap": ("swap?model=qwen2.5-7b&layers=every&every=4", 800),
    "rows": ("rows", 800),
    "images": ("images?frames=2&at=109", 800),
    "text": ("text", 1330),
    "results": ("results?report=v1-tiny", 660),
    "known-bugs": ("known_bugs?bug=bfloat16-positions", 1000),
}
"""The address of each screen, and the height of its picture."""


def take(page: Page, address: str, height: int) -> bytes:
    """Return a picture of a screen as PNG with 256 colours."""
    from PIL import Image

    from tests.explore.conftest import LONGEST, SHOWN

    page.set_viewport_size({"width": WIDTH, "height": height})
    page.goto(address)
    page.wait_for_selector(SHOWN, timeout=LONGEST)
    page.wait_for_timeout(500)  # pictures fade in
    file = io.BytesIO()
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256).save(file, "png", optimize=True)
    return file.getvalue()


def main(*names: str) -> None:
    """Write the pictures of these screens, or of all."""
    from playwright.sync_api import sync_playwright

    from tests.browser import FLAGS, chromium
    from tests.explore.conftest import explorer

    with explorer() as (address, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*FLAGS])
        for theme in ("light", "dark"):
            for name in names or SCREENS:
                part, height = SCREENS[name]
                page = browser.new_page(color_scheme=theme, reduced_motion="reduce")
                (FOLDER / f"{name}-{theme}.png").write_bytes(take(page, f"{address}#{part}", height))
                page.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
