"""Old names of public attributes, which stay for one release."""

from __future__ import annotations

import warnings
from typing import Any


class Renamed:
    """An old name of an attribute or method. Reading it warns, and returns the attribute with the new name.

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

    def warn(self, owner: type, stacklevel: int) -> None:
        """Warn that this attribute of a class has a new name."""
        warnings.warn(
            f"locant: {owner.__name__}.{self.old} is now {self.new}; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=stacklevel + 1,
        )

    def __get__(self, instance: object, owner: type) -> Any:
        self.warn(owner, stacklevel=2)
        return getattr(owner if instance is None else instance, self.new)


def adopt_old_names(cls: type) -> None:
    """Copy attributes that a subclass defines under an old name to the new name, and warn."""
    for base in cls.__mro__[1:]:
        for old, renamed in vars(base).items():
            if isinstance(renamed, Renamed) and old in vars(cls):
                renamed.warn(cls, stacklevel=3)
                setattr(cls, renamed.new, vars(cls)[old])
