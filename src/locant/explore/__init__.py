"""`locant explore`: encodings, models and rows of tokens to look at, in a browser on this machine.

`screens/` computes and answers, `page/screens/` draws: a file for each screen. Numbers are made here, in Python; on a
page that was saved, ``page/saved.js`` computes those that have a closed form. `session` reads what an address says and
holds the files that are open, `document` writes the page, `server` speaks HTTP on the loopback address, `comparison`
runs one, `notebook` has the widget.

To add a screen, write two files and nothing else:

1. ``screens/rows.py`` with ``SCREENS = {"rows": Screen(...)}``. Its function reads each setting from a `State`, with a
   default and its limits (which become the control on the page), and returns a dictionary: numbers, texts, lists, and
   NumPy arrays, which arrive as arrays. The key ``"python"`` holds the code of each picture, by its name.
2. ``page/screens/rows.js``, which exports ``open(place, page)``. It builds its controls and pictures once, and returns
   ``{show(answer), keys}``: `show` is called with every new answer, ``keys`` names what keys do. What a visitor changes
   goes through ``page.change({name: value})``: into the address, from there to Python, and back into `show`.

``tests/explore/screens.py`` names what a test in the browser does with every screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from locant.explore.notebook import Widget

__all__ = ["widget"]


def widget(address: str = "compare", *, files: Sequence[str] = (), configs: Sequence[str] = ()) -> Widget:
    """A screen of the explorer in a notebook: the last expression of a cell shows it.

    Args:
        address: a screen and its settings, as they stand in the explorer's address after the ``#``.
        files, configs: as for ``locant explore``.

    Raises:
        InputError: an address without such a screen, a file that is not there; or anywidget is not installed.

    >>> shown = widget("compare?1=rotary&2=alibi&length=256")
    >>> shown.settings = {**shown.settings, "2": "t5"}  # as if it had been chosen there
    """
    from locant.explore.session import Session, read_address
    from locant.extras import require

    require("anywidget", "a widget")
    from locant.explore.notebook import Widget

    return Widget(*read_address(address), Session.of(files, configs))
