"""Look up values by name: built-in values, values that callers register, and values of installed packages.

An installed package offers a value through an entry point. The entry point is loaded when its name is first looked up,
or when all values are listed. If it cannot be loaded, it is reported under its name and does not affect the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points, packages_distributions
from typing import Any, Generic, TypeVar

from locant.arguments import entries, short_repr
from locant.errors import InputError, LocantError, RangeError

T = TypeVar("T")


@dataclass(frozen=True)
class PlugIn:
    """A value of an installed package, with its entry point and the kind of the value, such as ``"encoding"``."""

    kind: str
    entry: Any  # an `EntryPoint` of the standard library, or of a backport that replaces it
    value: object = None

    def __str__(self) -> str:
        return f"{self.kind} {self.entry.name!r} of {self.package}"

    @property
    def package(self) -> str:
        """The name with which pip installs the package."""
        return self.entry.dist.name if self.entry.dist else self.entry.module


LOADED: list[PlugIn] = []
"""The plug-ins that any registry has loaded and can use."""


def plug_in_of(value: object) -> PlugIn | None:
    """Return the loaded plug-in with this value, its class or its nearest base class, or ``None``."""
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    return next((plug_in for each in (value, *kinds) for plug_in in LOADED if plug_in.value is each), None)


def plug_ins_by_module() -> dict[str, PlugIn]:
    """Return the loaded plug-ins by the top-level modules of their packages.

    An entry point names one module. The metadata of its distribution names all modules that are installed with it.
    """
    by_distribution = {plug_in.package: plug_in for plug_in in LOADED}
    installed = packages_distributions() if LOADED else {}
    plug_ins = {
        module: by_distribution[name]
        for module, names in installed.items()
        for name in names
        if name in by_distribution
    }
    return plug_ins | {plug_in.entry.module.partition(".")[0]: plug_in for plug_in in LOADED}


class Registry(Generic[T]):
    """Values by name and alias.

    Args:
        kind: the word for a value in errors, such as ``"encoding"``.
        group: the entry-point group in which installed packages offer values.
        check: called with a name and a value. It raises a `LocantError` if the value cannot be used.
        own: called when a name is first looked up. It registers this package's own values with `register`.
        aliases_of: returns the aliases that a value itself defines.

    >>> fruits = Registry("fruit", "example.fruits", lambda name, value: None)
    >>> fruits.register("apple", 1, aliases=("pomme",))
    >>> fruits.find("aple")
    Traceback (most recent call last):
    ...
    locant.errors.RangeError: got fruit 'aple', expected one of apple; try: 'apple'
    """

    def __init__(
        self,
        kind: str,
        group: str,
        check: Callable[[str, T], None],
        own: Callable[[Registry[T]], None] = lambda registry: None,
        aliases_of: Callable[[T], Iterable[str]] = lambda value: (),
    ) -> None:
        self.kind = kind
        self.group = group
        self._check = check
        self._aliases_of = aliases_of
        self._register_own: Callable[[Registry[T]], None] | None = own
        self._values: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._offers: dict[str, Any] | None = None
        self.broken: dict[str, str] = {}
        """The errors of the entry points that could not be loaded, by name."""

    def register(self, name: str, value: T, aliases: Iterable[str] = ()) -> None:
        """Register a value. Raise a `RangeError` if it cannot be used, or if a name is taken."""
        self._fill()
        self._add(name, value, aliases)

    def _add(self, name: str, value: T, aliases: Iterable[str]) -> None:
        self._check(name, value)
        aliases = (*entries("aliases", aliases, "aliases=('other_name',)"), *self._aliases_of(value))
        for each in (name, *aliases):
            if not isinstance(each, str) or not re.fullmatch(r"\w[\w .+-]*", each):
                cause = (
                    f"got {short_repr(each)} as a name of {self.kind}s, expected letters, digits, '_', '-', '+' and '.'"
                )
                raise RangeError(cause, "use a name such as 'my_name'")
            owner = self._aliases.get(key_of(each))
            if owner is not None and (owner != name or self._values[owner] is not value):
                raise RangeError(f"got {self.kind} {each!r}, which is already registered", "use another name")
        self._values[name] = value
        self._aliases |= {key_of(each): name for each in (name, *aliases)}

    def find(self, name: str) -> T:
        """Return the value with this name or alias. Case does not matter, and ``-`` and ``_`` are the same.

        Raises:
            RangeError: the name is unknown. The remedy is the nearest name.
            InputError: the value of an installed package cannot be loaded.
        """
        self._fill()
        key = key_of(name) if isinstance(name, str) else ""
        if key not in self._aliases:
            if key in self._read_entry_points():
                return self._load(key)
            self._load_all()  # the name may be an alias of a value that is not loaded yet
        if key in self._aliases:
            return self._values[self._aliases[key]]
        names = {**self._aliases, **{offer: entry.name for offer, entry in self._read_entry_points().items()}}
        nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        raise RangeError(
            f"got {self.kind} {short_repr(name)}, expected one of {', '.join(dict.fromkeys(names.values()))}",
            repr(names[nearest[0]]) if nearest else f"use one of these {self.kind}s",
        )

    def name_of(self, name: str) -> str:
        """Return the registered name of the value that `find` returns. Raise the same errors as `find`."""
        self.find(name)
        return self._aliases[key_of(name)]

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield every name with its value, starting with this package's names. This fills `broken`."""
        self._fill()
        self._load_all()
        yield from list(self._values.items())

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the other names of a value, in the form that `find` compares."""
        return tuple(alias for alias, value in self._aliases.items() if value == name and alias != key_of(name))

    def _fill(self) -> None:
        if self._register_own is not None:
            register_own, self._register_own = self._register_own, None
            register_own(self)

    def _read_entry_points(self) -> dict[str, Any]:
        if self._offers is None:
            self._offers = {}
            for entry in entry_points(group=self.group):
                key = key_of(entry.name)
                if key in self._aliases or key in self._offers:
                    self.broken[entry.name] = f"{PlugIn(self.kind, entry)} is not used: the name is already taken"
                else:
                    self._offers[key] = entry
        return self._offers

    def _load_all(self) -> None:
        for key in self._read_entry_points():
            if key not in self._aliases and key not in self.broken:
                try:
                    self._load(key)
                except InputError as error:
                    self.broken[key] = str(error)

    def _load(self, key: str) -> T:
        entry = self._read_entry_points()[key]
        plug_in = PlugIn(self.kind, entry)
        try:
            value = entry.load()
            self._add(entry.name, value, ())
            LOADED.append(replace(plug_in, value=value))
        except LocantError as error:
            raise InputError(f"{plug_in} cannot be used: {error.cause}", error.remedy) from error
        except (Exception, SystemExit) as error:  # code of another package may fail in any way
            raise InputError(
                f"{plug_in} cannot be loaded: {type(error).__name__}: {error}",
                f"pip install -U {entry.dist.name if entry.dist else 'the package that offers it'}",
            ) from error
        return self._values[entry.name]


def key_of(name: str) -> str:
    """Return a name in the form used to compare names."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")
