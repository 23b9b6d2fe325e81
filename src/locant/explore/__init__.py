"""`locant explore`: encodings, models and rows of tokens to look at, in a browser on this machine.

`screens/` holds one file per screen, which computes; `page/screens/` one of the same name, which draws. Numbers are
made here, in Python, and nowhere in JavaScript. `state` reads what an address says, `session` holds the files that are
open, `answers` joins the two, `document` writes the page, `server` speaks HTTP on the loopback address.

To add a screen, write two files and nothing else:

1. ``screens/rows.py`` with ``SCREEN = Screen(...)``. Its function reads each setting from a `State`, with a default and
   its limits (which become the control on the page), and returns a dictionary: numbers, texts, lists, and NumPy arrays,
   which arrive as arrays. The key ``"python"`` holds the code that draws or computes the same.
2. ``page/screens/rows.js``, which exports ``open(place, page)``. It builds its controls and pictures once, and returns
   ``{show(answer), keys}``: `show` is called with every new answer, ``keys`` names what keys do. What a visitor changes
   goes through ``page.change({name: value})``: into the address, from there to Python, and back into `show`.

``tests/explore/screens.py`` names what a test in the browser does with every screen.
"""
