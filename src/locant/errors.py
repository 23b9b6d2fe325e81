"""The exceptions of this package: each states what was got, what was expected, and a remedy.

All of them are `ValueError`s, so code that knows nothing of this package can catch them, and all of them
carry the remedy apart from the cause, so that the command line can print ``cause; try: remedy`` in one line.
"""

from typing import Any

__all__ = ["InputError", "LocantError", "RangeError", "Remedy", "ShapeError"]


class Remedy(str):
    """To give arguments other values, ``...`` where only the reader knows them; `text` is what stands around them.

    It reads as in Python. The command line writes its own options instead.

    >>> Remedy(head_dim=64), Remedy("{}, or a {}", base=500.0, scaling=...)
    ('head_dim=64', 'base=500.0, or a scaling=')
    """

    text: str
    arguments: dict[str, Any]

    def __new__(cls, text: str = "{}", /, **arguments: Any) -> "Remedy":
        words = [f"{name}={'' if value is ... else repr(value)}" for name, value in arguments.items()]
        self = super().__new__(cls, text.format(*words))
        self.text, self.arguments = text, arguments
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (self.text,), self.arguments  # for processes, which send errors to one another


class LocantError(ValueError):
    """A mistake in what was asked for.

    >>> str(LocantError("got 3 heads, expected 4", "pass num_heads=4"))
    'got 3 heads, expected 4; try: pass num_heads=4'
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause}; try: {remedy}" if remedy else cause)

    def __reduce__(self) -> tuple[type["LocantError"], tuple[str, str]]:
        # The default would hand the joined message back as the cause; data loader workers send errors this way.
        return type(self), (self.cause, self.remedy)


class ShapeError(LocantError):
    """Tensors whose shapes, dtypes or devices do not fit each other."""


class RangeError(LocantError):
    """A token id, position or segment that lies outside what its table or encoding defines."""


class InputError(LocantError):
    """A file, text or configuration that cannot be used as it is."""
