"""A candidate of a comparison: an encoding, its scaling beyond the trained length, and its positions."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from types import CodeType, ModuleType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from locant.arguments import one_of, short_repr
from locant.errors import InputError, RangeError, Remedy
from locant.lab.tasks import Task
from locant.positions import PositionEncoding, Positions
from locant.positions.base import ModelShape
from locant.positions.generalizing import abacus, coupled, randomized
from locant.positions.registry import find, name_of_class, require_encoding
from locant.positions.scaling import EXTENDING, DynamicNTK, scaling_by_name, scaling_name
from locant.spelling import dtype_name

EXTENSIONS = tuple(name for name in EXTENDING if name != DynamicNTK.info.name)
"""The scalings that extend a context by a factor and do not depend on the length of a sequence."""

OPTIONS: dict[str, dict[str, float]] = {
    "learned": {"init_std": 1.0},  # as large as the decoder's scaled token rows, or the effect would be small
    "learned_grid": {"init_std": 1.0},
    "convolutional": {"causal": True},
}

POSITION_SCHEMES = ("randomized", "abacus", "coupled")
"""Names of positions other than 0, 1, 2, ... See `locant.positions.generalizing`."""

PARTS = re.compile(r"(.+?\.py:\w+|[^+@]*(?:\+\+)?)(?:(\+)([^@]*))?(?:(@)(.*))?", re.DOTALL)
"""A pattern for the parts of a name: an encoding, a scaling and positions.

The encoding is a class in a file, or a name that may end in ++, such as RoPE++.
"""

PROCESS_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "use of deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
    ),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}  # fmt: skip
THREAD_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default device": (
        torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "recording of gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on the CPU": (
        lambda: torch.is_autocast_enabled("cpu"), lambda is_on: torch.set_autocast_enabled("cpu", is_on),
    ),
}  # fmt: skip
"""Settings of torch that change the results of other code, with functions that read and set each setting.

They do not include seeds, because each model is built from its own seed. After that, nothing is drawn from torch's
generators.
"""


@dataclass(frozen=True)
class Candidate:
    """An encoding, its scaling beyond the trained length, and the positions at which it is trained and read.

    The model is trained with the plain encoding only. At each longer length, the frequencies are scaled by
    length / trained length, as in a model whose context is extended without fine-tuning.
    """

    encoding: str
    scaling: str = ""
    position_scheme: str = ""

    @classmethod
    def of(cls, name: str) -> Candidate:
        """Parse a name such as ``alibi``, ``rotary+yarn``, ``rotary@randomized`` or ``mine.py:Mine``."""
        encoding, plus, scaling, at, scheme = re.fullmatch(PARTS, str(name)).groups("")  # type: ignore[union-attr]
        if at:
            remedy = f"{encoding}{plus}{scaling}@randomized"
            scheme = one_of("positions", scheme.strip().lower(), POSITION_SCHEMES, remedy)
        if scaled := scaling_name(encoding):
            raise RangeError(f"got {short_repr(name)}, which is a scaling of rotary", f"rotary+{scaled}")
        kind = kind_of(encoding)
        encoding = name_of_class(kind) or (os.path.normpath(encoding) if ".py:" in encoding else encoding)
        if plus and "scaling" not in inspect.signature(kind).parameters:
            cause = f"got {short_repr(name)}, but {encoding} has no frequencies to scale"
            raise RangeError(cause, f"use {encoding} or rotary+yarn")
        if plus:
            remedy = " or ".join(f"{encoding}+{extension}" for extension in EXTENSIONS)
            scaling = one_of("a scaling", scaling_name(scaling) or scaling.strip().lower(), EXTENSIONS, remedy)
        return cls(encoding, scaling, scheme)

    @property
    def name(self) -> str:
        scaling = f"+{self.scaling}" if self.scaling else ""
        scheme = f"@{self.position_scheme}" if self.position_scheme else ""
        return f"{self.encoding}{scaling}{scheme}"

    @property
    def trained(self) -> Candidate:
        """The candidate to train: this candidate without its scaling."""
        return replace(self, scaling="")

    @property
    def source(self) -> str:
        """The SHA-256 of the Python file with the encoding, or an empty string for a registered encoding."""
        return _module_of(self.encoding)[1] if ".py:" in self.encoding else ""

    def build(self, shape: ModelShape) -> PositionEncoding:
        """Build the encoding for training."""
        return kind_of(self.encoding).for_model(shape, **OPTIONS.get(self.encoding, {}))

    def at_length(self, trained: Any, length: int, train_length: int, shape: ModelShape) -> PositionEncoding:
        """Return the trained encoding for rows of `length` tokens, scaled if necessary."""
        if not self.scaling or length <= train_length:
            return trained
        dim, base = getattr(trained, "rotary_dim", shape.head_dim), getattr(trained, "base", 10_000.0)
        scaling = scaling_by_name(f"{self.scaling}:{length / train_length}", train_length, dim, base)
        scaled = kind_of(self.encoding).for_model(shape, scaling=scaling)
        scaled.load_state_dict(trained.state_dict())
        return scaled

    def positions(
        self, ids: Int[Tensor, "batch seq"], longest: int, seed: int | None = None, *, task: Task | None = None,
        length: int = 0,
    ) -> Positions:  # fmt: skip
        """Return the positions of the tokens of a batch.

        Args:
            longest: tokens in the longest row that will be read.
            seed: the seed of random positions in training. It differs between batches. Without a seed, the same rows
                have the same positions, and digits are counted from 1.
            task: the task of the rows, which have `length` items each. Default: a text.

        Raises:
            InputError: the positions count the digits of numbers, but the rows contain no numbers.
        """
        seq_len, device = ids.shape[1], ids.device
        if not self.position_scheme:
            return Positions.arange(seq_len, device=device)
        if self.position_scheme == "randomized":
            return randomized(seq_len, longest, seed=seed or 0, device=device)
        numbers = task.numbers_of(length) if task else []
        if task is None or not numbers:
            got = f"got {self.name} for rows without numbers, whose digits it counts"
            raise InputError(got, Remedy(tasks=("addition",)))
        offset = 0 if seed is None else Random(seed).randrange(max(1, longest // len(numbers) - length))
        if self.position_scheme == "abacus":
            return abacus(ids, task.digits, offset=offset)
        return coupled(numbers, start=1 + offset, reverse_operands=True, length=seq_len, device=device)


def kind_of(encoding: str) -> type[PositionEncoding]:
    """Return the class of an encoding. For a name such as ``mine.py:Mine``, execute the file ``mine.py``."""
    if encoding.endswith(".py"):
        raise RangeError(f"got {encoding}, a file, expected a class in it", f"{encoding}:Mine")
    if ".py:" not in encoding:
        return find(encoding.replace("++", "_plus_plus"))
    (module, _), name = _module_of(encoding), encoding.rpartition(":")[2]
    kind: Any = getattr(module, name, None)
    if kind is None:
        raise RangeError(f"got {encoding}, but there is no {name} in this file", "use the name of a class in it")
    require_encoding(name, kind)
    return kind


def parse_without_scaling(name: str) -> Candidate:
    """Parse a name for training. Raise `RangeError` if it has a scaling, because a scaling is not trained."""
    candidate = Candidate.of(f"rotary+{name}" if scaling_name(name) else name)
    if candidate.scaling:
        raise RangeError(f"got {name!r}, but a scaling is not trained", repr(candidate.trained.name))
    return candidate


def process_settings() -> dict[str, Any]:
    """Return the values of the `PROCESS_SETTINGS`."""
    return {name: get() for name, (get, _) in PROCESS_SETTINGS.items()}


@contextmanager
def preserve_torch_settings(what: str, of_process: Mapping[str, Any] | None = None) -> Generator[None]:
    """Restore torch's settings at the end of the block, and raise `InputError` if the code in it changed one.

    Args:
        what: the name of the code.
        of_process: the correct settings of the process. Default: the settings at the beginning of the block, which
            other threads may have changed already.

    Raises:
        InputError: the code changed a setting.
    """
    every = {**PROCESS_SETTINGS, **THREAD_SETTINGS}
    before = {name: get() for name, (get, _) in every.items()} | {**(of_process or {})}
    changed = list[str]()
    try:
        yield
    finally:
        for name, (get, restore) in every.items():
            if (after := get()) != before[name]:
                restore(before[name])
                old, new = (
                    dtype_name(each) if isinstance(each, torch.dtype) else each for each in (before[name], after)
                )
                changed.append(f"torch's {name} from {old} to {new}")
    if changed:
        got = f"got {what}, which changes {', '.join(changed)}, also for all other encodings"
        raise InputError(got, "leave torch's settings as they are, and give tensors their dtype and device")


def _module_of(encoding: str) -> tuple[ModuleType, str]:
    return _run(Path(f"{encoding.rpartition('.py:')[0]}.py").resolve())


class _Loader(SourceFileLoader):
    """A loader that compiles the given source of a file and does not store bytecode.

    Stored bytecode would count as current if a changed file had the same size and was written in the same second.
    """

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        super().__init__(name, str(path))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


@functools.cache  # so that a comparison uses one class, even if the file changes in the meantime
def _run(path: Path) -> tuple[ModuleType, str]:
    """Run a file, and return its module and its SHA-256. As in a script, the file can import files from its folder."""
    try:
        source = path.read_bytes()
        name = f"locant_file_{path.stem}_{abs(hash(path)):x}"
        loader = _Loader(name, path, source)
        spec = spec_from_file_location(name, path, loader=loader)
        if str(path.parent) not in sys.path:  # not removed later, for imports inside functions
            sys.path.append(str(path.parent))
        module = sys.modules[name] = module_from_spec(spec)  # type: ignore[arg-type]  # a loader makes a spec
        with preserve_torch_settings(str(path)):
            loader.exec_module(module)
    except InputError:
        raise
    except OSError as error:
        got = f"got {path} for an encoding, which cannot be read: {error.strerror}"
        raise InputError(got, "use a Python file, as in mine.py:Mine") from None
    except (Exception, SystemExit) as error:  # the user's code may fail in any way
        raise InputError(f"got {path}, which cannot be run: {type(error).__name__}: {error}", "correct it") from error
    return module, hashlib.sha256(source).hexdigest()
