"""The exceptions of this package, and its warning about configurations.

Each message states the value that was passed, what was expected, and a remedy.

All exceptions are `ValueError`s, so code that does not import this package can catch them. They store the cause and the
remedy separately, so that the command line can print ``cause; try: remedy`` in one line.
"""

from typing import Any

__all__ = ["ConfigWarning", "InputError", "LocantError", "PythonRemedy", "RangeError", "Remedy", "ShapeError"]


class Remedy(str):
    """A remedy that sets arguments.

    Each ``{}`` in `text` is replaced by one argument, such as ``head_dim=64``. ``...`` stands for a value that only the
    reader knows. The string is written for Python. The command line prints its own options instead.

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
        return (self.text,), self.arguments  # for pickle: processes send errors to each other


class PythonRemedy(str):
    """A remedy in Python code, with other advice for the command line.

    The command line suggests the options for `encodings`, which are names of encodings. If there are none, it prints
    `words`. `scaling` is the class of the scaling that was given instead of an encoding, or empty.

    >>> PythonRemedy("locant.encoding('learned', max_seq_len=512, d_model=64)", encodings=("learned",))
    "locant.encoding('learned', max_seq_len=512, d_model=64)"
    """

    encodings: tuple[str, ...]
    words: str
    scaling: str

    def __new__(
        cls, code: str, /, *, encodings: tuple[str, ...] = (), words: str = "", scaling: str = ""
    ) -> "PythonRemedy":
        self = super().__new__(cls, code)
        self.encodings, self.words, self.scaling = encodings, words, scaling
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (str(self),), vars(self)  # for pickle


class LocantError(ValueError):
    """The base class of this package's errors, which report mistakes in a call.

    >>> str(LocantError("got 3 heads, expected 4", "pass num_heads=4"))
    'got 3 heads, expected 4; try: pass num_heads=4'
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause}; try: {remedy}" if remedy else cause)

    def __reduce__(self) -> tuple[type["LocantError"], tuple[str, str]]:
        # By default, pickle would pass the whole message as the cause. Data loader workers send errors by pickle.
        return type(self), (self.cause, self.remedy)


class ShapeError(LocantError):
    """Tensors with incompatible shapes, dtypes or devices."""


class RangeError(LocantError):
    """A value that is not allowed, such as a token id without a row in its table, or an unknown name."""


class InputError(LocantError):
    """A file, text or configuration that cannot be used as it is."""


class ConfigWarning(UserWarning):
    """A value in a configuration that the model's own code ignores or replaces."""
