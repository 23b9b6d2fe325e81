"""What an address says, and what is open in one run of the explorer: files and configurations, given or dropped."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from locant.arguments import MAX_INT32, Real, one_of, real, whole
from locant.checkpoints.config_source import CONFIG, read_source
from locant.errors import InputError, RangeError
from locant.files import FaultError, strict_json
from locant.lab.results import RECORD, RECORDED, RESULTS
from locant.models.registry import presets

if TYPE_CHECKING:
    from locant.explore.comparison import Comparison

USUAL = "report", "demo/report"  # where `locant compare` and `make demo` write, seen from the current folder

LONGEST, LONGEST_NUMBER = 100_000, 40
"""Characters of one setting."""

SCALING_TITLES = {
    "linear": "linear (position interpolation)", "ntk": "NTK-aware", "dynamic": "dynamic NTK", "yarn": "YaRN",
    "longrope": "LongRoPE", "llama3": "Llama 3", "proportional": "proportional (Gemma 4)",
}  # fmt: skip
"""What a page calls scalings in words."""
MAX_DROPPED = 8 * 2**20
"""Bytes of a file that is dropped on the page; those named on the command line may be of any size."""

MAX_KEPT = 16
"""Dropped files that are held in memory; the oldest goes first."""

FIRST_MODEL = "qwen2.5-7b"
DROPPED = "dropped-"
"""What the keys of dropped files begin with."""


def read_address(address: str) -> tuple[str, dict[str, str]]:
    """The screen and the settings of the part of an address after its ``#``.

    >>> read_address("compare?1=rotary&1.base=500000")
    ('compare', {'1': 'rotary', '1.base': '500000'})
    """
    screen, _, settings = address.removeprefix("#").partition("?")
    return screen, dict(parse_qsl(settings))


class State:
    """Settings by name, as texts. Whatever is read is a control of the page, with its limits and its value.

    >>> state = State({"length": "64"})
    >>> state.whole("length", 128, 2, 4096), state.one_of("layout", "half", ["half", "interleaved"])
    (64, 'half')
    >>> state.settled
    {'length': '64', 'layout': 'half'}
    """

    def __init__(self, given: Mapping[str, str], prefix: str = "", controls: dict[str, Any] | None = None) -> None:
        self._given = given
        self._prefix = prefix
        self.controls: dict[str, Any] = {} if controls is None else controls

    @property
    def settled(self) -> dict[str, str]:
        """Every setting that was read, defaults included."""
        return {name: control["text"] for name, control in self.controls.items()}

    def part(self, prefix: str) -> State:
        """The settings whose names begin with this, by the rest of their names."""
        return State(self._given, f"{self._prefix}{prefix}.", self.controls)

    def whole(
        self, name: str, default: int, low: int, high: int = MAX_INT32, *, log: bool = False, even: bool = False,
        follows: bool = False,
    ) -> int:  # fmt: skip
        """An integer, an even one where that is asked for; `log`: the slider moves by factors.

        `follows`: the limits depend on other settings, so a number that was within them may lie beyond when these
        change, and is then the nearest limit.
        """
        value = self._number(name, default, int)
        if follows and isinstance(value, int):
            value = min(max(value, low), high)
        number = whole(name, value, low, high, even=even, remedy=f"{name}={default}")
        return self._settle(name, "whole", number, low=low, high=high, log=log, step=2 if even else 1)

    def real(self, name: str, default: float, low: Real, high: Real, *, log: bool = False) -> float:
        """A number; `log` as in `whole`."""
        value = self._number(name, default, float)
        number = float(real(name, value, low=low, high=high, remedy=f"{name}={default:g}"))
        return self._settle(name, "real", number, low=low, high=high, log=log)

    def one_of(self, name: str, default: str, names: Sequence[str], titles: Mapping[str, str] | None = None) -> str:
        """One of these, shown by their `titles` where these have some."""
        value = one_of(name, self._text(name, default), names)
        return self._settle(name, "choice", value, choices=list(names), titles=dict(titles or {}))

    def text(self, name: str, default: str = "", longest: int = LONGEST) -> str:
        """Any text of at most so many characters."""
        value = self._text(name, default)
        if len(value) > longest:
            raise RangeError(f"got {len(value):,} characters for {name}, expected at most {longest:,}", "a shorter one")
        return self._settle(name, "text", value, longest=longest)

    def _text(self, name: str, default: object) -> str:
        self.controls[self._prefix + name] = {}  # the last of them is what was read last, also where it is refused
        return self._given.get(self._prefix + name, str(default))

    def _number(self, name: str, default: Real, kind: type) -> Any:
        """A number, or a text that is none."""
        text = self._text(name, default)
        try:
            return kind(text) if len(text) < LONGEST_NUMBER else text
        except ValueError:
            return text

    def _settle(self, name: str, kind: str, value: Any, **limits: Any) -> Any:
        text = f"{value:.12g}" if kind == "real" else str(value)
        full = self._prefix + name
        self.controls[full] = {"name": full, "kind": kind, "value": value, "text": text, **limits}
        return value


@dataclass(frozen=True)
class Dropped:
    """A file that was dropped on a page: its name, which is shown and never opened, and its bytes."""

    name: str
    content: bytes


@dataclass
class Session:
    """What the screens may look at beside an address, in several threads: a dictionary of it is replaced, not changed.

    Args:
        files: texts, folders of reports and folders of models, from the command line.
        configs: configurations from the command line, by name.
        is_shared: the answer leaves this machine, and says nothing of its folders.
    """

    files: Sequence[Path] = ()
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    is_shared: bool = False
    _starting: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, files: Sequence[str], configs: Sequence[str]) -> Session:
        """Of names from the command line, all of which have to be there."""
        for file in map(Path, files):
            if not file.exists():
                raise InputError(f"got no file {file}", "the path of a text, or of a report's folder")
            if file.is_dir() and not any((file / name).is_file() for name in (CONFIG, RESULTS, RECORD)):
                got = f"got the folder {file}, which has neither a {CONFIG} nor a {RESULTS}"
                raise InputError(got, "the folder of a model, or one that `locant compare` or `locant evaluate` wrote")
        session = cls([Path(file) for file in files])
        there = _named([Path(source) for source in configs if Path(source).exists()])
        presets = {source: source for source in configs if not Path(source).exists()}
        sources = {**there, **presets, **session.models}
        session.configs = {name: read_source(source) for name, source in sources.items()}
        return session

    @cached_property
    def names(self) -> dict[str, Path]:
        """The files by what an address and a page call them."""
        return _named(self.files)

    def written(self, name: str) -> str:
        """How Python names the file."""
        return name if self.is_shared else str(self.names.get(name, self.reports.get(name, name)))

    @property
    def texts(self) -> dict[str, Path]:
        """All that is no folder."""
        return {name: file for name, file in self.names.items() if file.is_file()}

    @property
    def models(self) -> dict[str, Path]:
        """Folders of models: those with a configuration."""
        return {name: file for name, file in self.names.items() if (file / CONFIG).is_file()}

    @property
    def reports(self) -> dict[str, Path]:
        """All other folders, and those of models that `locant tune` wrote.

        If none is given, the `USUAL` ones, and if these are not there either, what this package has recorded.
        """
        folders = {name: file for name, file in self.names.items() if file.is_dir()}
        given = {name: each for name, each in folders.items() if name not in self.models or (each / RECORD).is_file()}
        usual = {name: Path(name) for name in USUAL if (Path(name) / RESULTS).is_file()}
        return given or usual or {file.stem: file for place in RECORDED for file in sorted(place.glob("v*.json"))}

    def drop(self, name: str, content: bytes) -> str:
        """Keep a file that was dropped on the page; returns the key by which an address names it."""
        key = DROPPED + hashlib.sha256(content).hexdigest()[:16]
        files = {**self.dropped, key: Dropped(name[:200], content)}
        self.dropped = dict([*files.items()][-MAX_KEPT:])
        return key

    def chosen(
        self, state: State, setting: str, first: str, names: Sequence[str], titles: Mapping[str, str] | None = None
    ) -> tuple[str, Dropped | None]:
        """The one of these names, or the key of a dropped file, that an address holds; and the file."""
        files, asked = self.dropped, state.text(setting)
        if asked.startswith(DROPPED) and asked not in files:
            raise InputError("this address names a file that was dropped on another page", "drop the file here again")
        of_files = {key: file.name for key, file in files.items()}
        name = state.one_of(setting, first, [*names, *files], {**(titles or {}), **of_files})
        return name, files.get(name)

    def chosen_model(self, state: State) -> tuple[str, str, Mapping[str, Any]]:
        """By the name of a preset, as the command line named it, or by the key of a dropped file; and its title."""
        models: dict[str, Any] = {**self.configs, **presets(), **self.configs}  # first, and before one of a preset
        name, dropped = self.chosen(state, "model", next(iter(self.configs), FIRST_MODEL), [*models])
        if dropped is None:
            return name, name, models[name]
        try:
            return name, dropped.name, strict_json(dropped.content, dropped.name)
        except FaultError as error:
            raise InputError(str(error), "the config.json of a model") from None

    def compare(self, start: Callable[[], Comparison]) -> str:
        """Start a comparison, one at a time, and keep it; returns its key."""
        with self._starting:
            if any(run.state == "running" for run in self.comparisons.values()):
                raise InputError("a comparison is running here", "wait for it, or stop it")
            key = f"run-{len(self.comparisons) + 1}"
            self.comparisons = {**self.comparisons, key: start()}
        return key

    def stop(self, *, wait: bool = False) -> None:
        """End the comparison that runs; what it has measured is written, `wait` until it is."""
        for comparison in self.comparisons.values():
            comparison.stop(wait=wait)


def _named(files: Sequence[Path]) -> dict[str, Path]:
    """By as much of the ends of their paths as tells them apart."""
    parts = {file.resolve().parts: file for file in files}

    def name(own: tuple[str, ...]) -> str:
        others = [each for each in parts if each != own]
        size = next(size for size in count(1) if own[-size:] not in [each[-size:] for each in others])
        return "/".join(own[-size:])

    return {name(own): file for own, file in parts.items()}
