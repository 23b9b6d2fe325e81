"""The subject of a probe: a target that rotates tokens, with the calling convention that works.

We do not read code. Instead we try every known calling convention on a few tokens, and take the first convention that
returns tokens and rotates later positions differently. A trial call may raise any error.
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

from locant.arguments import MAX_INT32, short_repr
from locant.errors import InputError
from locant.positions.base import PositionEncoding
from locant.probing.table_calls import APPLY_REMEDY, WIDTHS, Apply, Trial, is_axial, rotating_functions, table_calls
from locant.probing.token_calls import (
    CALL_ERRORS,
    ENCODING,
    HEADS,
    NUM_TOKENS,
    OFFSET_METHOD,
    ROTATION_REMEDY,
    TWO_SIDED_METHOD,
    Convention,
    Failures,
    UnusableError,
    counting_call,
    direct_calls,
    fixed_length_calls,
    for_both_sides,
    fused_calls,
    unpack_sides,
)
from locant.spelling import spell

WIDTH_NAMES = ("head_dim", "dim_head", "d_head", "head_size", "d_k", "dim", "d", "d_model", "embed_dim")
"""Attributes that may hold the width of a head or a token.

For a rotation, we trust ``head_dim`` and only try the other values.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A target that rotates tokens.

    Args:
        limit: the last position that may be tried.
        original: a copy of the unused module, or ``None`` if the target is not a module or cannot be copied.
    """

    target: Any
    convention: Convention
    width: int
    axes: int = 1
    limit: int = MAX_INT32
    original: nn.Module | None = None

    def rotate(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens rotated as queries and as keys, one tensor twice if the target does not distinguish them."""
        return self.convention.call(self.target, x, index)

    def fresh_copy(self, dtype: torch.dtype | None = None) -> Subject:
        """Return the subject with a fresh copy of its module, cast to a dtype, or this subject if it has no copy."""
        if self.original is None:
            return self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a cast discards the imaginary part of complex numbers
            return replace(self, target=copy.deepcopy(self.original).to(dtype))

    def with_limit(self, limit: int) -> Subject:
        """Return the subject with its last position lowered to this limit."""
        return replace(self, limit=min(limit, self.limit))

    def sides(self) -> tuple[Subject, ...]:
        """Return a subject for queries and one for keys, or only one if the target does not distinguish them."""
        q, k = self.rotate(torch.ones(1, HEADS, NUM_TOKENS, self.width), self.index(*range(NUM_TOKENS)))
        calls = [lambda *given, side=side: for_both_sides(self.convention.call(*given)[side]) for side in (0, 1)]
        conventions = [replace(self.convention, call=call) for call in calls]
        return (self,) if q is k else tuple(replace(self, convention=each) for each in conventions)

    def with_counting(self) -> Subject:
        """Return a subject that counts tokens, for a target that ignores its positions."""

        def by_count(target: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.convention.call(target, x, self.index(*range(x.shape[2])))

        convention = replace(self.convention, call=counting_call(by_count), takes_positions=False)
        return replace(self, convention=convention, axes=1)

    def index(self, *positions: int, axis: int | None = None) -> Tensor:
        """Return an index ``[1, seq, axes]`` with positions on all axes, or on one axis and 0 on the others."""
        is_used = torch.tensor([axis in (None, each) for each in range(self.axes)])
        return torch.tensor(positions)[None, :, None] * is_used


def name_of(target: Any) -> str:
    """Return the name of a target for sentences."""
    return getattr(target, "__qualname__", None) or type(target).__name__


def find_subject(
    target: Any,
    failures: Failures,
    *,
    head_dim: int | None = None,
    axes: int | None = None,
    apply: Apply | None = None,
    limit: int | None = None,
    config: Any = None,
    layer_type: str | None = None,
    qkv: tuple[int, int, int] | None = None,
) -> Subject | None:
    """Return the subject for a target, or ``None`` if no call returns tokens. `failures` then holds the errors."""
    stated = [each for each in (head_dim or _stated_width(target, config),) if each]
    guessed = [getattr(target, name, None) for name in WIDTH_NAMES]
    widths = stated or [*(each for each in guessed if isinstance(each, int) and each > 1 and not each % 2), *WIDTHS]
    counts = _stated_axes(target) if axes is None else (axes,)
    best: tuple[int, Subject] | None = None
    for width, num_axes, convention in _trials(target, widths, counts, stated, apply, layer_type, qkv, failures):
        subject = Subject(target=target, convention=convention, width=width, axes=num_axes, limit=limit or MAX_INT32)
        try:
            score = _score(subject)
        except CALL_ERRORS as error:
            failures.setdefault(re.split(":| with tokens|, in place", convention.notation)[0], error)
            continue
        if score == BEST:
            return _with_original(subject)
        # A call that leaves its tokens unchanged does not rotate in place.
        if (best is None or score > best[0]) and (score or not convention.writes):
            best = score, subject
    return None if best is None else _with_original(best[1])


BEST = 2


def _score(subject: Subject) -> int:
    """Return 2 if positions rotate all heads equally, 1 if heads differ, and 0 if positions have no effect.

    A convention that confuses heads with tokens gets a lower score.
    """
    x, index = torch.ones(1, HEADS, NUM_TOKENS, subject.width), subject.index(*range(NUM_TOKENS))
    others = torch.cat([x[..., :1], -x[..., 1:]], -1)
    sides = unpack_sides(subject.rotate(x, index), x.shape, 2)
    if not all(side.isfinite().all() for side in sides):
        remedy = "return finite numbers for tokens of ones at positions 0, 1 and 2"
        raise UnusableError("returned NaN or infinite numbers", remedy)
    q, k = (side.clone() for side in sides)
    if torch.equal(subject.rotate(others, index)[0], q):
        raise UnusableError("returned the same for different tokens", ROTATION_REMEDY)
    moves = any(bool((side[:, 0, :1] != side[:, 0, 1:]).any()) for side in (q, k))
    return moves + (moves and all(torch.equal(side[:, 0], side[:, 1]) for side in (q, k)))


def _with_original(subject: Subject) -> Subject:
    with contextlib.suppress(*CALL_ERRORS):
        if isinstance(subject.target, nn.Module):
            return replace(subject, original=copy.deepcopy(subject.target))
    return subject


def _trials(
    target: Any, widths: Sequence[int], counts: Sequence[int], stated: Sequence[int], apply: Apply | None,
    layer_type: str | None, qkv: tuple[int, int, int] | None, failures: Failures,
) -> Iterator[Trial]:  # fmt: skip
    """Yield widths and numbers of axes with every calling convention, the most likely first."""

    def trials(conventions: Callable[[], Iterator[Convention]]) -> Iterator[Trial]:
        for width, num_axes in itertools.product(widths, counts):
            yield from ((width, num_axes, convention) for convention in conventions())

    functions = rotating_functions(target) if apply is None else [apply]
    tables = table_calls(target, stated, counts, functions, layer_type, failures)
    direct = trials(lambda: direct_calls(target))
    if isinstance(target, PositionEncoding):
        return trials(lambda: iter((ENCODING,)))
    if qkv is not None:
        return trials(lambda: fused_calls(target, qkv))
    if hasattr(target, "rotate_queries_or_keys"):
        return trials(lambda: iter((TWO_SIDED_METHOD if getattr(target, "use_xpos", False) else OFFSET_METHOD,)))
    if apply is not None or type(target).__module__.startswith("transformers."):
        return itertools.chain(tables, direct)
    lengths = trials(lambda: fixed_length_calls(target)) if isinstance(target, nn.Module) else ()
    return itertools.chain(direct, tables if isinstance(target, nn.Module) else (), lengths)


def _stated_width(target: Any, config: Any) -> int | None:
    """Return the width of a head, or ``None`` if it is not stated or differs between layers, as in Gemma 4."""
    stated = {} if config is None else config if isinstance(config, Mapping) else config.to_dict()
    if stated.get("per_layer_config"):
        return None

    def read(name: str) -> Any:
        return stated.get(name, None if isinstance(config, Mapping) else getattr(config, name, None))

    width, heads = read("hidden_size"), read("num_attention_heads")
    values = [getattr(target, "head_dim", None), stated.get("qk_rope_head_dim"), stated.get("head_dim")]
    values += [width // heads] if isinstance(width, int) and isinstance(heads, int) else []
    return next((value for value in values if isinstance(value, int)), None)


def _stated_axes(target: Any) -> tuple[int, ...]:
    """Return the numbers of axes that positions may have, the most likely first."""
    if isinstance(target, PositionEncoding):
        return (getattr(getattr(target, "pairs", None), "num_axes", 1),)
    if is_axial(target):
        return (2, 3)
    sections = getattr(target, "mrope_section", None)
    return (len(sections),) if isinstance(sections, (list, tuple)) else (3,) if sections else (1, 2, 3, 4)


# ---------------------------------------------------------------------- errors


def refuse(target: Any, failures: Failures) -> NoReturn:
    """Raise `InputError` because no calling convention fits the target. The message names each call and its error."""
    if inspect.isclass(target) and issubclass(target, nn.Module):
        got = f"got the class {target.__name__}, which has to be built before it can be called"
        raise InputError(got, f"locant.probe({target.__name__}(...))")
    calls: dict[str, list[str]] = {}
    for notation, error in failures.items():
        outcome = error.cause if isinstance(error, UnusableError) else f"raised {type(error).__name__}: {error}"
        calls.setdefault(" ".join(outcome.split()), []).append(notation)
    reasons = "; ".join(f"{' and '.join(notations)} {outcome}" for outcome, notations in calls.items())
    got = f"got {short_repr(target)}, which neither rotates tokens nor returns a bias with any known calling convention"
    errors = [error for error in failures.values() if isinstance(error, UnusableError)]
    first = next(iter(failures.values()), None)
    tables = next((error.remedy for error in errors if error.remedy == APPLY_REMEDY), None)
    remedy = tables or (first.remedy if isinstance(first, UnusableError) else ROTATION_REMEDY)
    raise InputError(f"{got}: {reasons}" if reasons else got, remedy) from first


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def refuse_unsteady(target: Any, one: Tensor, again: Tensor) -> None:
    """Raise `InputError` if two equal calls differ by more than the last digits."""
    difference = float((one - again).nan_to_num().abs().max())
    if difference > 1e-4:
        got = f"two equal calls differ by up to {spell(difference, 2)}"
        owner = getattr(target, "__self__", target)
        modules = owner.modules() if isinstance(owner, nn.Module) else ()
        has_dropout = any(isinstance(each, DROPOUTS) and each.training and each.p > 0 for each in modules)
        dropout, state = "whose dropout is active, because it is in training mode", "which is random or keeps a state"
        reason = dropout if has_dropout else state
        got = f"got {name_of(target)}, {reason}: {got}"
        raise InputError(got, "call .eval() on its module, which turns dropout off, or remove the random part")
