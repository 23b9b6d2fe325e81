"""Still pictures of the live figures, where there is no JavaScript: ``python -m docs.generator.stills`` writes them.

Drawn by the figures themselves, in Chromium; to be run again when one of them begins with another picture.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from docs.generator.live import NAME, bare, script

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parents[1] / "images"
FOLDER = IMAGES / "essay"
FIGURES = (
    "shuffle", "integers", "fractions", "bits", "waves", "added", "turn", "hands", "ladder", "beyond", "scalings",
)  # fmt: skip
LESSONS = ("embeddings", "windows", "biases", "segments", "gpt")
"""Of the course, which begin otherwise than a figure of the essay; the other lessons show its pictures."""
CLOCKS = "clocks"
"""Of the page of screens, whose first picture of all pairs stands for it."""
WIDTH = 720


DEFAULT = re.compile(
    r' (?:fill-opacity="1"|opacity="1"|visibility="visible"|stroke="none"|stroke-dasharray="none"|stroke-width="1px"|'
    r'stroke-linejoin="miter"|stroke-linecap="butt"|text-anchor="start"|font-family="[^"]*"|font-weight="400")'
)
"""What an element of SVG has where nothing is said, and the font, which is said once for all."""
FONT = "system-ui, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"


def still(page: Page, within: str) -> str:
    """All pictures of one figure in one SVG, beside and below each other as on the page."""
    parts, (left, width, top, bottom) = [], (None, 0.0, 0.0, 0.0)
    for button in page.locator(f"{within} button[aria-label^=SVG]").all():
        with page.expect_download() as download:
            button.evaluate("each => each.click()")
        text = DEFAULT.sub("", Path(download.value.path()).read_text(encoding="utf-8"))
        wide, high = (float(re.findall(rf'^<svg [^>]*?\b{side}="([\d.]+)"', text)[0]) for side in ("width", "height"))
        place = button.evaluate("each => each.closest('figure').getBoundingClientRect().left")
        left = place if left is None else left
        top = top if place > left else bottom
        parts.append(text.replace("<svg ", f'<svg x="{place - left:g}" y="{top:g}" ', 1))
        width, bottom = max(width, place - left + wide), max(bottom, top + high)
    size = f'width="{width:g}" height="{bottom:g}" viewBox="0 0 {width:g} {bottom:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">{"".join(parts)}</svg>\n'


def main() -> None:
    """Write them all."""
    from playwright.sync_api import sync_playwright

    from tests.browser import FLAGS, chromium

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        (Path(folder) / NAME).write_text(script(), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*FLAGS])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        lessons = [f"lesson-{name}" for name in LESSONS]
        for folder_of, names in ((FOLDER, FIGURES), (FOLDER, ()), (IMAGES / "course", lessons)):
            (Path(folder) / "page.html").write_text(bare(*names), encoding="utf-8")
            page.goto((Path(folder) / "page.html").as_uri())
            for name in names or (CLOCKS,):
                within = f"#essay-{name}" if names else f"[data-picture={CLOCKS}]"
                page.wait_for_selector(f"{within} .plot svg")
                file = folder_of / f"{name.removeprefix('lesson-')}.svg"
                file.write_text(still(page, within), encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main()
