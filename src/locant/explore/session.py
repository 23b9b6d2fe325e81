"""The settings in an explorer's address, and the files and configurations that are passed to it or dropped on it."""

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

USUAL = "report", "demo/report"  # where `locant compare` and `make demo` write, relative to the current folder

LONGEST, LONGEST_NUMBER = 100_000, 40
"""The largest number of characters of one setting, and of one number."""

SCALING_TITLES = {
    "linear": "linear (position interpolation)", "ntk": "NTK-aware", "dynamic": "dynamic NTK", "yarn": "YaRN",
    "longrope": "LongRoPE", "llama3": "Llama 3", "proportional": "proportional (Gemma 4)",
}  # fmt: skip
"""The titles of scalings on a page."""
MAX_DROPPED = 8 * 2**20
"""The largest size of a file dropped on the page, in bytes. Files on the command line have no limit."""

MAX_KEPT = 16
"""The number of dropped files in memory. The oldest is removed first."""

FIRST_MODEL = "qwen2.5-7b"
DROPPED = "dropped-"
"""The prefix of the keys of dropped files."""


def read_address(address: str) -> tuple[str, dict[str, str]]:
    """Split the part of an address after its ``#`` into the screen and its settings.

    >>> read_address("compare?1=rotary&1.base=500000")
    ('compare', {'1': 'rotary', '1.base': '500000'})
    """
    screen, _, settings = address.removeprefix("#").partition("?")
    return screen, dict(parse_qsl(settings))


class State:
    """Settings by name, as texts. Each setting that is read becomes a control of the page, with limits and a value.

    >>> state = State({"length": "64"})
    >>> state.whole("length", 128, 2, 4096), state.one_of("layout", "half", ["half", "interleaved"])
    (64, 'half')
    >>> state.settings
    {'length': '64', 'layout': 'half'}
    """

    def __init__(self, given: Mapping[str, str], prefix: str = "", controls: dict[str, Any] | None = None) -> None:
        self._given = given
        self._prefix = prefix
        self.controls: dict[str, Any] = {} if controls is None else controls

    @property
    def settings(self) -> dict[str, str]:
        """Every setting that was read, including defaults."""
        return {name: control["text"] for name, control in self.controls.items()}

    def part(self, prefix: str) -> State:
        """Return the settings with this prefix, and omit the prefix from their names."""
        return State(self._given, f"{self._prefix}{prefix}.", self.controls)

    def whole(
        self, name: str, default: int, low: int, high: int = MAX_INT32, *, log: bool = False, even: bool = False,
        follows: bool = False,
    ) -> int:  # fmt: skip
        """Read an integer. With `even`, it must be even. With `log`, the slider moves by factors.

        `follows` means that the limits depend on other settings. If these settings put the number outside its limits,
        it becomes the nearest limit.
        """
        value = self._number(name, default, int)
        if follows and isinstance(value, int):
            value = min(max(value, low), high)
        number = whole(name, value, low, high, even=even, remedy=f"{name}={default}")
        return self._add_control(name, "whole", number, low=low, high=high, log=log, step=2 if even else 1)

    def real(self, name: str, default: float, low: Real, high: Real, *, log: bool = False) -> float:
        """Read a number. `log` is as in `whole`."""
        value = self._number(name, default, float)
        number = float(real(name, value, low=low, high=high, remedy=f"{name}={default:g}"))
        return self._add_control(name, "real", number, low=low, high=high, log=log)

    def one_of(self, name: str, default: str, names: Sequence[str], titles: Mapping[str, str] | None = None) -> str:
        """Read one of these names. The page shows their `titles`, if any."""
        value = one_of(name, self._text(name, default), names)
        return self._add_control(name, "choice", value, choices=list(names), titles=dict(titles or {}))

    def text(self, name: str, default: str = "", longest: int = LONGEST) -> str:
        """Read a text of at most `longest` characters."""
        value = self._text(name, default)
        if len(value) > longest:
            got = f"got {len(value):,} characters for {name}, expected at most {longest:,}"
            raise RangeError(got, "use a shorter one")
        return self._add_control(name, "text", value, longest=longest)

    def _text(self, name: str, default: object) -> str:
        self.controls[self._prefix + name] = {}  # so the last control is the setting read last, even after an error
        return self._given.get(self._prefix + name, str(default))

    def _number(self, name: str, default: Real, kind: type) -> Any:
        """Return the setting as a number, or as text if it is not a number."""
        text = self._text(name, default)
        try:
            return kind(text) if len(text) < LONGEST_NUMBER else text
        except ValueError:
            return text

    def _add_control(self, name: str, kind: str, value: Any, **limits: Any) -> Any:
        text = f"{value:.12g}" if kind == "real" else str(value)
        full = self._prefix + name
        self.controls[full] = {"name": full, "kind": kind, "value": value, "text": text, **limits}
        return value


@dataclass(frozen=True)
class Dropped:
    """The name and the bytes of a file that was dropped on a page. The name is only shown."""

    name: str
    content: bytes


@dataclass
class Session:
    """The open files and comparisons. Several threads read it, so its dictionaries are replaced and never changed.

    Args:
        files: texts, folders of reports and folders of models, from the command line.
        configs: configurations from the command line, by name.
        is_shared: whether the answer leaves this machine, so that it must not contain the names of folders.
    """

    files: Sequence[Path] = ()
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    is_shared: bool = False
    _starting: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, files: Sequence[str], configs: Sequence[str]) -> Session:
        """Open the files and configurations of the command line. Raise `InputError` if one does not exist."""
        for file in map(Path, files):
            if not file.exists():
                raise InputError(f"got no file {file}", "pass the path of a text, or of a report's folder")
            if file.is_dir() and not any((file / name).is_file() for name in (CONFIG, RESULTS, RECORD)):
                got = f"got the folder {file}, which has neither a {CONFIG} nor a {RESULTS}"
                raise InputError(got, "pass the folder of a model, or of a report of locant compare or evaluate")
        session = cls([Path(file) for file in files])
        local = _shorten_names([Path(source) for source in configs if Path(source).exists()])
        presets = {source: source for source in configs if not Path(source).exists()}
        sources = {**local, **presets, **session.models}
        session.configs = {name: read_source(source) for name, source in sources.items()}
        return session

    @cached_property
    def names(self) -> dict[str, Path]:
        """The files by their names in addresses and on the page."""
        return _shorten_names(self.files)

    def path_in_code(self, name: str) -> str:
        """Return the path of the file for Python code, or only its name if the answer is shared."""
        return name if self.is_shared else str(self.names.get(name, self.reports.get(name, name)))

    @property
    def texts(self) -> dict[str, Path]:
        """All files that are not folders."""
        return {name: file for name, file in self.names.items() if file.is_file()}

    @property
    def models(self) -> dict[str, Path]:
        """All folders with a configuration, which are models."""
        return {name: file for name, file in self.names.items() if (file / CONFIG).is_file()}

    @property
    def reports(self) -> dict[str, Path]:
        """All other folders, and the model folders that `locant tune` wrote.

        If there are none, return the `USUAL` folders. If these do not exist either, return the recorded reports of this
        package.
        """
        folders = {name: file for name, file in self.names.items() if file.is_dir()}
        reports = {name: each for name, each in folders.items() if name not in self.models or (each / RECORD).is_file()}
        usual = {name: Path(name) for name in USUAL if (Path(name) / RESULTS).is_file()}
        return reports or usual or {file.stem: file for place in RECORDED for file in sorted(place.glob("v*.json"))}

    def drop(self, name: str, content: bytes) -> str:
        """Store a file that was dropped on the page, and return its key in addresses."""
        key = DROPPED + hashlib.sha256(content).hexdigest()[:16]
        files = {**self.dropped, key: Dropped(name[:200], content)}
        self.dropped = dict([*files.items()][-MAX_KEPT:])
        return key

    def choose(
        self, state: State, setting: str, first: str, names: Sequence[str], titles: Mapping[str, str] | None = None
    ) -> tuple[str, Dropped | None]:
        """Return the name in an address and ``None``, or the key of a dropped file and that file."""
        files, key = self.dropped, state.text(setting)
        if key.startswith(DROPPED) and key not in files:
            raise InputError("this address names a file that was dropped on another page", "drop the file here again")
        file_titles = {key: file.name for key, file in files.items()}
        name = state.one_of(setting, first, [*names, *files], {**(titles or {}), **file_titles})
        return name, files.get(name)

    def choose_model(self, state: State) -> tuple[str, str, Mapping[str, Any]]:
        """Return the name, title and configuration of the chosen preset, command-line model or dropped file."""
        models: dict[str, Any] = {**self.configs, **presets(), **self.configs}  # they come first and override presets
        name, dropped = self.choose(state, "model", next(iter(self.configs), FIRST_MODEL), [*models])
        if dropped is None:
            return name, name, models[name]
        try:
            return name, dropped.name, strict_json(dropped.content, dropped.name)
        except FaultError as error:
            raise InputError(str(error), "use the config.json of a model") from None

    def compare(self, start: Callable[[], Comparison]) -> str:
        """Start a comparison and return its key. Raise `InputError` if one is running."""
        with self._starting:
            if any(run.state == "running" for run in self.comparisons.values()):
                raise InputError("a comparison is already running", "wait for it, or stop it")
            key = f"run-{len(self.comparisons) + 1}"
            self.comparisons = {**self.comparisons, key: start()}
        return key

    def stop(self, *, wait: bool = False) -> None:
        """Stop the running comparison, which writes its results so far. With `wait`, return when it has ended."""
        for comparison in self.comparisons.values():
            comparison.stop(wait=wait)


def _shorten_names(files: Sequence[Path]) -> dict[str, Path]:
    """Name the files by the shortest distinct ends of their paths."""
    file_by_parts = {file.resolve().parts: file for file in files}

    def name(parts: tuple[str, ...]) -> str:
        others = [each for each in file_by_parts if each != parts]
        size = next(size for size in count(1) if parts[-size:] not in [each[-size:] for each in others])
        return "/".join(parts[-size:])

    return {name(parts): file for parts, file in file_by_parts.items()}
