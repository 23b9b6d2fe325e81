"""`locant explore`: view encodings, models and rows of tokens in a browser on this machine.

`screens/` computes the answers and `page/screens/` draws them, with one file for each screen. Python computes the
numbers. On a saved page, ``page/saved.js`` computes the numbers that have a closed form. `session` reads addresses and
holds the open files, `document` writes the page, `server` serves HTTP on the loopback address, `comparison` runs a
comparison, and `notebook` has the widget.

To add a screen, write two files:

1. ``screens/rows.py`` with ``SCREENS = {"rows": Screen(...)}``. Its function reads each setting from a `State`, with a
   default and limits (which become the control on the page), and returns a dictionary of numbers, texts, lists, and
   NumPy arrays, which reach the page as arrays. The key ``"python"`` holds the code of each picture, by its name.
2. ``page/screens/rows.js``, which exports ``open(place, page)``. It builds its controls and pictures once, and returns
   ``{show(answer), keys}``. `show` is called with every new answer, and ``keys`` describes the keyboard keys. A
   visitor's changes go through ``page.change({name: value})`` into the address, from there to Python, and back into
   `show`.

``tests/explore/screens.py`` lists the browser test of every screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from locant.explore.notebook import Widget

__all__ = ["widget"]


def widget(address: str = "compare", *, files: Sequence[str] = (), configs: Sequence[str] = ()) -> Widget:
    """Return a screen of the explorer as a notebook widget. A notebook shows the last expression of a cell.

    Args:
        address: a screen and its settings, as in the explorer's address after the ``#``.
        files, configs: as for ``locant explore``.

    Raises:
        InputError: there is no such screen or file, or anywidget is not installed.

    >>> screen = widget("compare?1=rotary&2=alibi&length=256")
    >>> screen.settings = {**screen.settings, "2": "t5"}  # as if a visitor had chosen it
    """
    from locant.explore.session import Session, read_address
    from locant.extras import require

    require("anywidget", "a widget")
    from locant.explore.notebook import Widget

    return Widget(*read_address(address), Session.of(files, configs))
