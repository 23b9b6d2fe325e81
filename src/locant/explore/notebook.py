"""A screen of the explorer as a notebook widget, with the page's modules and numbers from this Python process."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from locant.errors import LocantError
from locant.explore.document import bundle, stylesheet
from locant.explore.screens import answer, answer_for_one_screen, as_json, find_screen, sentence
from locant.explore.session import Session


class Widget(anywidget.AnyWidget):
    """One screen. The visitor or Python can change `settings`, which are the settings of an address.

    If they are wrong, `refused` holds the error and the previous picture stays.
    """

    _esm = f"{bundle('widget.js')}export default joined['widget.js'];"
    style = traitlets.Unicode(stylesheet()).tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    about = traitlets.Unicode().tag(sync=True)
    module = traitlets.Unicode().tag(sync=True)
    settings = traitlets.Dict(value_trait=traitlets.Unicode(), key_trait=traitlets.Unicode()).tag(sync=True)
    answer = traitlets.Unicode().tag(sync=True)
    refused = traitlets.Unicode().tag(sync=True)

    def __init__(self, screen: str, settings: dict[str, str], session: Session) -> None:
        screen_class = find_screen(screen)
        self._screen, self._session = screen, session
        super().__init__(
            title=screen_class.title, about=screen_class.about, module=f"screens/{screen}.js", settings=settings,
            answer=as_json(answer_for_one_screen(screen, settings, session)),
        )  # fmt: skip
        self.observe(self._ask, "settings")

    def _ask(self, change: Any) -> None:
        try:
            self.answer = as_json(answer(self._screen, change["new"], self._session))
        except LocantError as error:
            self.refused = sentence(error)
        else:
            self.refused = ""
