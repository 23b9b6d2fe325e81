"""``locant.probe``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from locant.arguments import shown, whole
from locant.errors import LocantError, RangeError
from locant.models.architecture import UNKNOWN
from locant.models.probe.architecture import probe_config, rotary_module_of
from locant.models.probe.bias import bias_report
from locant.models.probe.measurement import probe_encoding, probe_rotation
from locant.models.probe.report import Report
from locant.models.probe.subject import subject_of
from locant.models.probe.trial import Tried, refusal
from locant.models.registry import read
from locant.positions.base import PositionEncoding
from locant.positions.encodings.rotary import Rotary

__all__ = ["probe"]


def probe(
    target: Any,
    *,
    head_dim: int | None = None,
    axes: int | None = None,
    apply: Callable[..., Any] | None = None,
    limit: int | None = None,
    config: Any = None,
    layer_type: str | None = None,
    expected: PositionEncoding | None = None,
) -> Report:
    """What a function or module does with positions, measured, without reading its code.

    Random tokens and unit vectors go in, and what comes out tells pairs, axes, frequencies, direction, lengths, whether
    scores depend on distances alone, how far angles are from the truth up to position 2^31 - 1, what a cast to
    bfloat16 does, and whether neighbours, rows, lengths or earlier calls matter. Takes a second at most for a head of
    128. A module is called as it is, on the CPU, and copied before it is cast.

    Args:
        target: ``f(x, positions)``, ``f(q, k, positions)`` or ``f(x)``, with tokens ``[batch, heads, seq, head_dim]``
            or heads behind; a rotary module of `transformers`, `rotary-embedding-torch`, `x-transformers` or
            `torchtune`; a model or a configuration of `transformers`, whose rotary module is probed; an encoding of
            this package; or a bias, ``f(query_len, key_len)`` or a module with ``compute_bias``.
        head_dim: the width of a head; default: as the module says, else widths are tried.
        axes: how many indices a position has; default: as many as work.
        apply: what rotates by the tables of a module; default: the function beside it in its Python module.
        limit: the last position that it can be asked for; default: none.
        config: the configuration a module was made from, which may say the width of a head.
        layer_type: which layers, for modules that ask.
        expected: an encoding that it should be; the report says where they part. Default: of a configuration, what
            this package makes of it.

    Raises:
        InputError: nothing that can be called in a known way; the message names the calls and what each ended with.
            Or what gives something else when it is called again, as with dropout.

    >>> from locant import Positions
    >>> found = probe(lambda x, positions: Rotary(8).rotate_one(x, Positions.of(positions)), head_dim=8)
    >>> found.encoding, found.warnings
    (Rotary(head_dim=8, base=10000, layout='half', angles='exact'), ())
    """
    for name, value in (("head_dim", head_dim), ("axes", axes), ("limit", limit)):
        if value is not None:
            whole(name, value, 1, remedy="an integer from 1, or None")
    if expected is not None and not isinstance(expected, PositionEncoding):
        raise RangeError(f"got {shown(expected)} for expected, expected an encoding", "expected=locant.Rotary(64)")
    if config is not None and inspect.isclass(target):
        target = config
    report: Report | None = None
    tried: Tried = {}
    with torch.no_grad():
        if isinstance(target, PositionEncoding):
            rotates = "rotate" in target.doors()
            report = probe_encoding(target, expected) if rotates else bias_report(target, expected, tried)
        elif isinstance(target, Mapping) or hasattr(target, "model_type"):
            known = _known(target, layer_type) if expected is None else expected
            return probe_config(target, layer_type=layer_type, expected=known)
        elif (module := rotary_module_of(target)) is not None:
            return probe_config(target.config, layer_type=layer_type, expected=expected, module=module)
        elif callable(target):
            options: dict[str, Any] = {"head_dim": head_dim, "axes": axes, "apply": apply, "limit": limit}
            subject = subject_of(target, config=config, layer_type=layer_type, tried=tried, **options)
            report = bias_report(target, expected, tried) if subject is None else probe_rotation(subject, expected)
    if report is None:
        raise refusal(target, tried) from next(iter(tried.values()), None)
    return report


def _known(config: object, layer_type: str | None) -> PositionEncoding | None:
    """What this package makes of a configuration whose architecture has a row; ``None``: nothing."""
    if read(config)[1].rotary is UNKNOWN:
        return None
    try:
        return Rotary.from_config(config, layer_type=layer_type)
    except LocantError:
        return None
