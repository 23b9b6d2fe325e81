"""What is probed, brought into one form: something that rotates tokens at positions, however it wants to be called.

No code is read: every way of calling that the field uses is tried on a few tokens. The first is taken whose tokens come
back, and come back otherwise from later positions. A call that is tried may raise whatever it likes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from locant.arguments import MAX_INT32, shown
from locant.errors import InputError
from locant.positions.base import PositionEncoding
from locant.probing.table_calls import APPLY, WIDTHS, Apply, Trial, is_axial, rotating_functions, table_calls
from locant.probing.token_calls import (
    BY_NAME,
    ENCODING,
    FAILED,
    HEADS,
    ROTATES,
    TRIAL,
    WITH_OFFSET,
    Tried,
    UnusableError,
    Way,
    counting_call,
    direct_calls,
    fixed_length_calls,
    for_both_sides,
    fused_calls,
    unpack_sides,
)

WIDTH_NAMES = ("head_dim", "dim_head", "d_head", "head_size", "d_k", "dim", "d", "d_model", "embed_dim")
"""Attributes in which a module may say its width; only the first is relied upon."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that rotates tokens.

    Args:
        limit: the last position that it can be asked for.
        original: a copy of its module as it was; ``None``: it is no module, or holds what Python cannot copy.
    """

    target: Any
    way: Way
    width: int
    axes: int = 1
    limit: int = MAX_INT32
    original: nn.Module | None = None

    def rotate(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of tokens as queries, and as keys; one tensor, where one result stands for both."""
        return self.way.call(self.target, x, index)

    def again(self, dtype: torch.dtype | None = None) -> Subject:
        """The same with a copy of its module as it was, cast to a dtype; itself, where there is none."""
        if self.original is None:
            return self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers, whose imaginary part a cast discards
            return replace(self, target=copy.deepcopy(self.original).to(dtype))

    def within(self, limit: int) -> Subject:
        """The same, asked for no position past this one."""
        return replace(self, limit=min(limit, self.limit))

    def sides(self) -> tuple[Subject, ...]:
        """What is done to queries, and what to keys, each as if both got it; one, where one result stands for both."""
        q, k = self.rotate(torch.ones(1, HEADS, TRIAL, self.width), self.places(*range(TRIAL)))
        calls = [lambda *given, side=side: for_both_sides(self.way.call(*given)[side]) for side in (0, 1)]
        return (self,) if q is k else tuple(replace(self, way=replace(self.way, call=call)) for call in calls)

    def counting(self) -> Subject:
        """What is told positions and counts tokens itself, as what it is."""

        def by_count(target: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.way.call(target, x, self.places(*range(x.shape[2])))

        return replace(self, way=replace(self.way, call=counting_call(by_count), given=False), axes=1)

    def places(self, *index: int, axis: int | None = None) -> Tensor:
        """These positions, ``[1, seq, axes]``: on one axis, with 0 on the others, or on all."""
        asked = torch.tensor([axis in (None, each) for each in range(self.axes)])
        return torch.tensor(index)[None, :, None] * asked


def name_of(target: Any) -> str:
    """What it is called in sentences."""
    return getattr(target, "__qualname__", None) or type(target).__name__


def subject_of(
    target: Any,
    tried: Tried,
    *,
    head_dim: int | None = None,
    axes: int | None = None,
    apply: Apply | None = None,
    limit: int | None = None,
    config: Any = None,
    layer_type: str | None = None,
    qkv: tuple[int, int, int] | None = None,
) -> Subject | None:
    """Return the one form of what was given to `probe`, or ``None`` if no call gives tokens back: `tried` says why."""
    stated = [each for each in (head_dim or _stated_width(target, config),) if each]
    guessed = [getattr(target, name, None) for name in WIDTH_NAMES]
    widths = stated or [*(each for each in guessed if isinstance(each, int) and each > 1 and not each % 2), *WIDTHS]
    counts = _stated_axes(target) if axes is None else (axes,)
    best: tuple[int, Subject] | None = None
    for width, num_axes, way in _trials(target, widths, counts, stated, apply, layer_type, qkv, tried):
        subject = Subject(target=target, way=way, width=width, axes=num_axes, limit=limit or MAX_INT32)
        try:
            likeness = _likeness(subject)
        except FAILED as error:
            tried.setdefault(re.split(":| with tokens|, in place", way.called)[0], error)
            continue
        if likeness == ALIKE:
            return _with_original(subject)
        if (best is None or likeness > best[0]) and (likeness or not way.writes):  # who writes nothing does not write
            best = likeness, subject
    return None if best is None else _with_original(best[1])


ALIKE = 2


def _likeness(subject: Subject) -> int:
    """2: later tokens are rotated otherwise than the first, and heads alike. 1: tokens are. 0: nothing changes.

    Where heads are taken for tokens, these are less.
    """
    x, index = torch.ones(1, HEADS, TRIAL, subject.width), subject.places(*range(TRIAL))
    others = torch.cat([x[..., :1], -x[..., 1:]], -1)
    sides = unpack_sides(subject.rotate(x, index), x.shape, 2)
    if not all(side.isfinite().all() for side in sides):
        remedy = "return finite numbers for tokens of ones at positions 0, 1 and 2"
        raise UnusableError("gave NaN or infinite numbers", remedy)
    q, k = (side.clone() for side in sides)
    if torch.equal(subject.rotate(others, index)[0], q):
        raise UnusableError("gave the same for other tokens", ROTATES)
    moves = any(bool((side[:, 0, :1] != side[:, 0, 1:]).any()) for side in (q, k))
    return moves + (moves and all(torch.equal(side[:, 0], side[:, 1]) for side in (q, k)))


def _with_original(subject: Subject) -> Subject:
    with contextlib.suppress(*FAILED):
        if isinstance(subject.target, nn.Module):
            return replace(subject, original=copy.deepcopy(subject.target))
    return subject


def _trials(
    target: Any, widths: Sequence[int], counts: Sequence[int], stated: Sequence[int], apply: Apply | None,
    layer_type: str | None, qkv: tuple[int, int, int] | None, tried: Tried,
) -> Iterator[Trial]:  # fmt: skip
    """Widths and numbers of axes with every way of calling, the likely first."""

    def called(ways: Callable[[], Iterator[Way]]) -> Iterator[Trial]:
        for width, num_axes in itertools.product(widths, counts):
            yield from ((width, num_axes, way) for way in ways())

    functions = rotating_functions(target) if apply is None else [apply]
    tables = table_calls(target, stated, counts, functions, layer_type, tried)
    direct = called(lambda: direct_calls(target))
    if isinstance(target, PositionEncoding):
        return called(lambda: iter((ENCODING,)))
    if qkv is not None:
        return called(lambda: fused_calls(target, qkv))
    if hasattr(target, "rotate_queries_or_keys"):
        return called(lambda: iter((BY_NAME if getattr(target, "use_xpos", False) else WITH_OFFSET,)))
    if apply is not None or type(target).__module__.startswith("transformers."):
        return itertools.chain(tables, direct)
    lengths = called(lambda: fixed_length_calls(target)) if isinstance(target, nn.Module) else ()
    return itertools.chain(direct, tables if isinstance(target, nn.Module) else (), lengths)


def _stated_width(target: Any, config: Any) -> int | None:
    """The width of a head, as far as it is said; layers of a Gemma 4 have no single one."""
    said = {} if config is None else config if isinstance(config, Mapping) else config.to_dict()
    if said.get("per_layer_config"):
        return None

    def read(name: str) -> Any:
        return said.get(name, None if isinstance(config, Mapping) else getattr(config, name, None))

    width, heads = read("hidden_size"), read("num_attention_heads")
    values = [getattr(target, "head_dim", None), said.get("qk_rope_head_dim"), said.get("head_dim")]
    values += [width // heads] if isinstance(width, int) and isinstance(heads, int) else []
    return next((value for value in values if isinstance(value, int)), None)


def _stated_axes(target: Any) -> tuple[int, ...]:
    """How many axes positions may have, the likely first."""
    if isinstance(target, PositionEncoding):
        return (getattr(getattr(target, "pairs", None), "num_axes", 1),)
    if is_axial(target):
        return (2, 3)
    sections = getattr(target, "mrope_section", None)
    return (len(sections),) if isinstance(sections, (list, tuple)) else (3,) if sections else (1, 2, 3, 4)


# ---------------------------------------------------------------------- refusals


def refuse(target: Any, tried: Tried) -> NoReturn:
    """What could be called in no way, with the calls that were tried, and what each ended with."""
    if inspect.isclass(target) and issubclass(target, nn.Module):
        got = f"got the class {target.__name__}, which has to be built before it can be called"
        raise InputError(got, f"locant.probe({target.__name__}(...))")
    calls: dict[str, list[str]] = {}
    for called, error in tried.items():
        ended = error.cause if isinstance(error, UnusableError) else f"raised {type(error).__name__}: {error}"
        calls.setdefault(" ".join(ended.split()), []).append(called)
    told = "; ".join(f"{' and '.join(ways)} {ended}" for ended, ways in calls.items())
    got = f"got {shown(target)}, which neither rotates tokens nor gives a bias in any way of calling that is known"
    errors = [error for error in tried.values() if isinstance(error, UnusableError)]
    first = next(iter(tried.values()), None)
    tables = next((error.remedy for error in errors if error.remedy == APPLY), None)
    remedy = tables or (first.remedy if isinstance(first, UnusableError) else ROTATES)
    raise InputError(f"{got}: {told}" if told else got, remedy) from first


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def refuse_unsteady(target: Any, one: Tensor, again: Tensor) -> None:
    """Of two equal calls the same is expected, up to the last digits."""
    apart = float((one - again).nan_to_num().abs().max())
    if apart > 1e-4:
        got = f"two equal calls give numbers up to {apart:.2g} apart"
        owner = getattr(target, "__self__", target)
        inside = owner.modules() if isinstance(owner, nn.Module) else ()
        drops = any(isinstance(each, DROPOUTS) and each.training and each.p > 0 for each in inside)
        why = "whose dropout is active, because it is in training mode" if drops else "which is random or keeps a state"
        got = f"got {name_of(target)}, {why}: {got}"
        raise InputError(got, ".eval() on its module, which turns dropout off, or leave the random part out")
