"""Old names of public attributes, which stay for one release."""

from __future__ import annotations

import warnings
from typing import Any


class Renamed:
    """The old name of an attribute or method: reading it warns and returns the attribute with the new name.

    >>> class Encoding:
    ...     methods = ("embed",)
    ...     doors = Renamed("methods")
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     Encoding().doors, str(caught[0].message)
    (('embed',), 'locant: Encoding.doors is now methods; the old name goes in the next release')
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, instance: object, owner: type) -> Any:
        warnings.warn(
            f"locant: {owner.__name__}.{self.old} is now {self.new}; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(owner if instance is None else instance, self.new)
