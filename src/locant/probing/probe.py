"""`locant.probe` measures foreign code, and the rotary modules of `transformers`.

For `transformers` nothing is downloaded, and only code of the installed package runs. An ``auto_map`` in a
configuration, which names foreign code, is ignored. We build only the rotary module, not the model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locant.arguments import Real, one_of, short_repr, whole
from locant.errors import InputError, LocantError, PythonRemedy, RangeError, Remedy
from locant.extras import is_installed, require
from locant.kernels.norm_rotary import HeadNorm
from locant.models import lab_decoder
from locant.models.architecture import UNKNOWN
from locant.models.encodings import rotary_from_config
from locant.models.registry import read_config
from locant.positions.angles import AngleMode
from locant.positions.base import PositionEncoding, reads_hidden_states
from locant.positions.encodings.rotary import Rotary
from locant.positions.encodings.xpos import XPos
from locant.probing.addition import addition_report, is_addition
from locant.probing.bias import bias_report
from locant.probing.norm import EPS, NormReport, options_of, weights_of, without_norm
from locant.probing.precision import (
    FLOAT32,
    UNHARMED,
    Arrangement,
    arrangement_of,
    precision_of,
    require_steady,
    shifts_of,
)
from locant.probing.report import SIDES, Report, RotationReport, first_difference
from locant.probing.rotation import EVEN, NEAR, Rotation, find_encoding, odd_pairs, rotations
from locant.probing.subject import Subject, find_subject, name_of, refuse
from locant.probing.token_calls import CALL_ERRORS, HEADS, Failures
from locant.spelling import spell

SAME = 1e-3
"""Tokens of size 1 count as equal up to this difference. Float32 angles up to 61 radians change them by 1e-5."""

AGREES = 1e-4
"""A measured encoding agrees with its target up to this difference, for float32 angles up to 61 radians."""

PARTS = ("Vision", "Audio")
"""Words in the class names of parts of a model. A rotary module is not built from another part's configuration."""

ROTARY_CLASS_NAME = re.compile(r"Rotary|Rope(?=[A-Z])|RoPE(?=[A-Z])")


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
    norm: HeadNorm | Tensor | tuple[Tensor, Tensor] | None = None,
    eps: Real = EPS,
    plus_one: bool = False,
    norm_follows: bool = False,
    qkv: tuple[int, int, int] | None = None,
) -> Report:
    """Measure what a function or module does with positions, without reading its code.

    We pass random tokens and unit vectors. The report has pairs, axes, frequencies, direction and lengths. It also has
    the errors of angles up to position 2^31 - 1 and the effect of a cast to bfloat16. It states whether scores depend
    only on distances, and whether neighbours, rows, lengths or earlier calls matter. This takes at most a second for a
    head of 128. A module is called unchanged on the CPU, and is copied before a cast.

    Args:
        target: one of these.
            A function or module that rotates tokens, ``f(x, positions)``, ``f(q, k, positions)``, ``f(x)`` or
            ``f(q, k)``, with tokens in any usual shape such as ``[batch, heads, seq, head_dim]``, in place or not.
            A function or module that adds a vector to each token.
            A function or module that makes tables of cosines and sines, or matrices, from positions or a length.
            A model or a configuration of `transformers`, whose rotary module is probed, or its path or name, as in
            ``locant probe``.
            A model of `locant train`, an encoding of this package, or a module that holds one.
            A bias, ``f(query_len, key_len)``, or a module with ``compute_bias``.
        head_dim: the width of a head. Default: the width that the module states. Otherwise widths are tried.
        axes: the number of indices of a position. Default: numbers are tried.
        apply: the function that rotates by the tables. Default: a function in the Python file of the module.
        limit: the last position to try. Default: no limit.
        config: the configuration of a module, which may state the width of a head.
        layer_type: the type of layers, for modules that need it. Default: the type of the first layer with rotary
            positions.
        expected: the encoding that the target should have. The report lists the differences. Default: the encoding that
            this package builds from a configuration.
        norm: the norm that should come before the rotation, if the target norms each head by RMSNorm as fused kernels
            do: a `HeadNorm`, or only the weights ``[head_dim]`` of queries and of keys. The report states whether norm,
            order and rotation are right. For a function of one side, ``f(x, positions)``, pass one tensor.
        eps: without a `HeadNorm`, the number that the norm adds to the mean square.
        plus_one: without a `HeadNorm`, whether the norm multiplies by 1 + the weights, as Gemma's does.
        norm_follows: whether the norm comes after the rotation, as HunYuan's does.
        qkv: the numbers of heads of queries, keys and values in the tensor ``[tokens, (hq + hk + hv) * head_dim]``,
            parts of which the function ``f(qkv, positions)`` rotates, in place or not.

    Raises:
        InputError: no known calling convention fits, two equal calls differ, as with dropout, or a model has no rotary
            module that can be measured. The message names the calls and their errors, or the reason.
        RangeError: an argument is out of range.

    >>> from locant import Positions
    >>> found = probe(lambda x, positions: Rotary(8).rotate_one(x, Positions.of(positions)), head_dim=8)
    >>> found.encoding, found.warnings
    (Rotary(head_dim=8, base=10000, layout='half', angles='exact'), ())
    """
    for name, value in (("head_dim", head_dim), ("axes", axes), ("limit", limit)):
        if value is not None:
            whole(name, value, 1, remedy="use an integer from 1, or None")
    norm, eps, plus_one = options_of(norm, eps, plus_one)
    if not (isinstance(eps, (int, float)) and 0 <= eps < 1):
        raise RangeError(f"got eps={short_repr(eps)}, expected a number from 0 and below 1", "eps=1e-6")
    if qkv is not None and (len(qkv) != 3 or not all(isinstance(each, int) and each > 0 for each in qkv)):
        got = f"got qkv={short_repr(qkv)}, expected the numbers of heads of queries, of keys and of values"
        raise RangeError(got, "qkv=(32, 8, 8)")
    if expected is not None and not isinstance(expected, PositionEncoding):
        raise RangeError(f"got {short_repr(expected)} for expected, expected an encoding", "expected=locant.Rotary(64)")
    if config is not None and inspect.isclass(target):
        target = config
    if isinstance(target, (str, Path)):
        from locant.checkpoints.config_source import find_source  # imports models, which import this file
        from locant.checkpoints.pretrained import read_lab_encoding

        if (encoding := read_lab_encoding(target)) is not None:
            return _probe_lab_model(str(target), encoding, expected)
        source = find_source(str(target))
        report = probe(source.config, layer_type=layer_type, expected=expected)
        if source.note is not None and isinstance(report, RotationReport):
            report = _with_note(report, f"It was made from {source.note}.")
        return report
    failures: Failures = {}
    with torch.no_grad():
        if isinstance(target, PositionEncoding):
            if "rotate" in target.methods():
                report = _probe_rotation(_subject_of(target), expected)
            else:
                report = bias_report(target, expected, failures) or addition_report(
                    target, expected, head_dim, failures
                )
        elif lab_decoder.is_lab_decoder(target):
            encoding = lab_decoder.encoding_from_lab_config(target)
            if encoding.state_dict():
                got = f"got the configuration of a model of locant train, whose {name_of(encoding)} has weights"
                raise InputError(got, "pass the path of its folder")
            report = _probe_lab_model("the configuration", encoding, expected)
        elif isinstance(target, Mapping) or hasattr(target, "model_type"):
            by_row = expected is None and read_config(target)[1].rotary is not UNKNOWN
            if by_row:
                with contextlib.suppress(LocantError):
                    expected = rotary_from_config(
                        Rotary, target, layer_type=layer_type, angles="exact", layout=None, for_all_layers=False
                    )
            report = _probe_config(target, layer_type, expected, by_row=by_row)
        elif (module := _rotary_module_in(target)) is not None:
            report = _probe_config(target.config, layer_type, expected, module)
        elif callable(target):
            weights = None if norm is None else weights_of(norm, head_dim, plus_one)
            width = head_dim if weights is None else len(weights[0])
            options: dict[str, Any] = {"head_dim": width, "axes": axes, "apply": apply, "limit": limit, "qkv": qkv}
            subject = find_subject(target, failures, config=config, layer_type=layer_type, **options)
            norm_report = None
            if subject is not None and weights is not None:
                subject, norm_report = without_norm(subject, weights, eps, plus_one, norm_follows)
            report = bias_report(target, expected, failures) if subject is None else None
            if report is None and norm_report is None and qkv is None and (subject is None or is_addition(subject)):
                report = addition_report(target, expected, head_dim, failures)
            if report is None and subject is not None:
                report = _probe_rotation(subject, expected, norm_report)
        else:
            report = None
    if report is None and isinstance(target, nn.Module):
        encoding = next((each for each in target.modules() if isinstance(each, PositionEncoding)), None)
        if encoding is not None and encoding is not target:
            return probe(encoding, expected=expected)
    return refuse(target, failures) if report is None else report


def _probe_lab_model(model: str, encoding: PositionEncoding, expected: PositionEncoding | None) -> Report:
    """Measure the encoding of a model of `locant train`."""
    if not encoding.methods():
        raise InputError(f"got {model}, which has no positions (NoPE)", "train one with locant train --encoding rotary")
    try:
        return probe(encoding, expected=expected)
    except LocantError as error:
        got = f"got {model}, whose {type(encoding).__name__} depends on more than positions"
        raise InputError(got, "measure its effect on the loss with locant evaluate MODEL --with own,nope") from error


def _probe_rotation(
    subject: Subject, expected: PositionEncoding | None, norm: NormReport | None = None, *, by_row: bool = False
) -> RotationReport:
    """Measure a rotation, with short sequences first. `by_row` is true if `expected` was read from a configuration."""
    subject = require_steady(subject)
    q, k = rotations(subject)
    differences, note = [] if expected is None else _differences((q, k), expected), None
    if by_row and differences and expected is not None and _has_frequencies_of(q, expected):
        differences, note, expected = [], OTHER_PAIRS.format(f"{expected!r}"), None
    arrangement = functools.reduce(
        Arrangement.with_keys, [arrangement_of(side.fresh_copy()) for side in subject.sides()]
    )
    reach = subject if arrangement.grows_at is None else subject.with_limit(arrangement.grows_at - 1)
    names = [find_encoding(side, subject.width, subject.axes) for side in ((q,) if k is q else (q, k))]
    truth = None if differences else expected
    sides = zip(reach.sides(), (q, k), (names[0], names[-1]), strict=False)
    precisions = [precision_of(*side, truth) for side in sides]
    kinds = [(each["rounding"], each["narrow"], each["uneven"] is None) for each in precisions]
    largest = [
        max([*each["errors"].values(), 0.0 if each["uneven"] is None else each["uneven"][1]]) for each in precisions
    ]
    harmed = [error > 0 and each["rounding"] not in UNHARMED for error, each in zip(largest, precisions, strict=True)]
    worst = max(range(len(precisions)), key=lambda side: (harmed[side], largest[side]))
    precision = precisions[worst]
    mode: AngleMode = "float32" if precision["rounding"] == FLOAT32 else "exact"
    candidates: list[PositionEncoding] = []
    is_norm_known = norm is None or None not in norm.found  # lengths after an unknown norm fit no encoding
    if is_norm_known and (angles := names[0]) is not None:  # lengths decide between the candidates
        candidates.append(angles.replace(angles=mode))
        if q.change > 1e-3 and angles.has_named_layout:
            candidates.append(XPos(angles.head_dim, base=angles.base, layout=angles.layout, angles=mode))
    compared = ((each, _largest_difference(subject, (q, k), each)) for each in candidates)
    encoding, agrees = next(((each, apart) for each, apart in compared if apart <= SAME * q.factor), (None, None))
    return RotationReport(
        subject=name_of(subject.target), called=subject.convention.notation, encoding=encoding, agrees=agrees,
        expected=expected,
        differences=tuple(text for text, _ in differences), costs=tuple(cost for _, cost in differences),
        head_dim=subject.width, axes=subject.axes, given=subject.convention.takes_positions, queries=q, keys=k,
        norm=norm, note=note,
        each=tuple(names) if encoding is None and k is not q else (), arrangement=arrangement,
        shifts=shifts_of(reach, q.factor * k.factor, min(precision["last"], reach.limit)),
        worse=None if len({*kinds}) == 1 else SIDES[worst], **precision,
    )  # fmt: skip


OTHER_PAIRS = (
    "locant reads its configuration as {}. The frequencies are equal, but the pairs or the heads differ: attention "
    "reorders dimensions or selects heads before it rotates them, and a measured rotary module does not show this."
)


def _has_frequencies_of(rotation: Rotation, expected: PositionEncoding) -> bool:
    """Return whether the pairs have the frequencies and axes of an encoding, in any dimensions."""
    both = (rotation, rotations(_subject_of(expected))[0])
    own_blocks, other_blocks = ([(block.axes, abs(sum(block.frequencies))) for block in one.blocks] for one in both)
    pairs = zip(sorted(own_blocks), sorted(other_blocks), strict=False)
    return len(own_blocks) == len(other_blocks) and all(
        a == b and math.isclose(one, other, rel_tol=1e-5) for (a, one), (b, other) in pairs
    )


def _subject_of(encoding: PositionEncoding) -> Subject:
    subject = find_subject(encoding, {})
    if subject is None:
        if reads_hidden_states(encoding):
            got = f"got {encoding!r}, which reads the hidden states of a text, and the probe has none"
            raise InputError(got, "use an encoding that depends on positions alone, such as locant.Rotary(64)")
        got = f"got {encoding!r}, which does not return {HEADS} heads in the width of its input"
        raise InputError(got, "use an encoding that rotates, such as locant.Rotary(64)")
    return subject


def _largest_difference(subject: Subject, sides: tuple[Rotation, Rotation], encoding: PositionEncoding) -> float:
    """Return the largest difference from an encoding, or infinity if queries and keys order dimensions differently."""
    if sides[0].order != sides[1].order:
        return math.inf
    generator = torch.Generator().manual_seed(0)
    last = min(NEAR[-1], subject.limit)
    orders = [torch.randperm(last + 1, generator=generator)[:16] for _ in range(subject.axes)]
    index = torch.stack(orders, -1)[None]
    x = torch.randn(1, HEADS, index.shape[1], subject.width, generator=generator)
    measured, other = (torch.stack(one.rotate(x.clone(), index)) for one in (subject, _subject_of(encoding)))
    return float((sides[0].reorder_to_input(measured) - other).abs().max())


Difference = tuple[str, str | None]
"""A difference in words, and the id of this mistake in `locant.position_costs`, or ``None`` if it has none."""


def _differences(sides: tuple[Rotation, Rotation], expected: PositionEncoding) -> list[Difference]:
    """Return the differences from an encoding, which is measured in the same way."""
    differences = [[*_side_differences(*both)] for both in zip(sides, rotations(_subject_of(expected)), strict=True)]
    if differences[0] == differences[1]:
        return differences[0]
    both = zip(SIDES, differences, strict=True)
    return [(f"of its {side}, {text}", cost) for side, of_side in both for text, cost in of_side]


def _side_differences(ours: Rotation, other: Rotation) -> Iterator[Difference]:
    """Yield the differences of one side from the same side of an encoding."""
    pairs = [[block.dims for block in one.blocks] for one in (ours, other)]
    if pairs[0] != pairs[1]:
        yield first_difference(pairs[0], pairs[1], "its pairs", "the encoding's"), _pairs_kind(*pairs)
        return
    if ours.num_heads != other.num_heads:
        heads = [
            "all heads" if each is None else f"the first {each} heads" for each in (ours.num_heads, other.num_heads)
        ]
        yield f"it rotates {heads[0]}, not {heads[1]}", "heads-not-rotated"
    if ours.bent > EVEN:
        yield "angles do not grow evenly with the position", None
        return
    odd, opposite = odd_pairs(ours, other, 1e-12)
    if odd and opposite:
        yield f"{len(odd)} of {len(ours.blocks)} pairs are rotated in the other direction", "direction-reversed"
    elif odd:
        (a, b), *_ = odd
        if a.axes != b.axes:
            axes = [" and ".join(map(str, each.axes)) or "none" for each in (a, b)]
            text = f"follow another axis, the first of them {a.dims} axis {axes[0]} and not axis {axes[1]}"
        else:
            speeds = f"{spell(sum(a.frequencies))} for {spell(sum(b.frequencies))}"
            text = f"have another frequency, the first of them {a.dims} with {speeds} radians per position"
        yield f"{len(odd)} of {len(ours.blocks)} pairs {text}", _frequency_kind(ours, other)
    if not math.isclose(ours.factor, other.factor, rel_tol=1e-5):
        yield f"tokens are multiplied by {spell(ours.factor)}, not by {spell(other.factor)}", "attention-factor"
    if ours.begin != other.begin:
        begin = "no position is" if ours.begin is None else f"position {spell(ours.begin)}"
        yield f"position 0 is rotated as {begin}", None


def _pairs_kind(ours: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> str | None:
    """Return the id of the mistake of these pairs in place of others, or ``None`` for other changes."""
    if not ours:
        return "not-rotated"
    if {*ours} < {*other}:
        return "pairs-not-rotated"
    half = len(other)
    halves = [(i, i + half) for i in range(half)]
    neighbours = [(2 * i, 2 * i + 1) for i in range(half)]
    # Code of halves for weights of neighbours, whose dimensions have taken the places of halves.
    mixed = sorted((i // 2 + half * (i % 2), (i + half) // 2 + half * ((i + half) % 2)) for i in range(half))
    if [*other] == halves and [*ours] == neighbours:
        return "half-as-interleaved"
    is_mixed = [*other] == halves and sorted(ours) == mixed
    return "interleaved-as-half" if is_mixed or ([*other] == neighbours and [*ours] == halves) else None


def _frequency_kind(ours: Rotation, other: Rotation) -> str | None:
    """Return the id of the mistake of these frequencies in place of others, or ``None`` for other changes."""
    both = [(sum(a.frequencies), sum(b.frequencies)) for a, b in zip(ours.blocks, other.blocks, strict=True)]
    if any(a.axes != b.axes for a, b in zip(ours.blocks, other.blocks, strict=True)) or not all(
        a * b > 0 for a, b in both
    ):
        return None
    for dtype, kind in ((torch.bfloat16, "frequencies-bfloat16"), (torch.float16, "frequencies-float16")):
        rounded = [torch.tensor(b, dtype=torch.float32).to(dtype).item() for _, b in both]
        if all(math.isclose(a, b, rel_tol=1e-5) for (a, _), b in zip(both, rounded, strict=True)):
            return kind
    ratios = [math.log(a / b) for a, b in both]
    steps = [later - earlier for earlier, later in itertools.pairwise(ratios)] or [0.0]
    if max(map(abs, steps)) < 1e-5:
        return "rotated-twice" if ratios[0] > 0 else "linear-unasked"
    if max(steps) - min(steps) > 1e-4 or abs(ratios[0]) > 1e-4:
        return None
    if math.isclose(both[-1][0], math.sqrt(both[-1][1]), rel_tol=1e-4):
        return "frequencies-of-twice-the-width"
    return "base-10000" if steps[0] > 0 else "base-times-10"


def is_measurable(config: object) -> bool:
    """Return whether `transformers` has a rotary module for this configuration that can be built."""
    return next(_rotary_modules(_configuration(config), {}), None) is not None


def measured_rotary(config: object, layer_type: str | None) -> Rotary:
    """Return the measured encoding of an unknown architecture, and warn that it was measured.

    Raises:
        InputError: the rotary module cannot be measured, its rotation is not an encoding of this package, or its
            frequencies depend on the length.
    """
    report = _probe_config(config, layer_type, None)
    name = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", "")
    encoding, grows_at = report.encoding, report.arrangement.grows_at
    remedy = "pass layout='half' or 'interleaved', as its weights were trained"
    if not isinstance(encoding, Rotary) or report.agrees is None or report.agrees > AGREES:
        raise InputError(f"got {name}, whose {report.subject} is not a known rotation: {report}", remedy)
    if grows_at is not None:
        got = f"got {name}, whose frequencies depend on the length from position {grows_at} on"
        raise InputError(f"{got}, which a measurement cannot name", remedy)
    warnings.warn(
        f"{name} has no row in locant.models: its encoding was measured on {report.subject} of transformers, "
        f"{encoding!r}, which agrees to {spell(report.agrees, 1)}",
        stacklevel=3,
    )
    return encoding


def _probe_config(
    config: object, layer_type: str | None, expected: PositionEncoding | None, module: nn.Module | None = None,
    by_row: bool = False,
) -> RotationReport:  # fmt: skip
    """Return a report on the rotary module of a configuration, or on `module` if it is already built."""
    require("transformers", "probing a model by its configuration")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own code warns about older configurations
        return _probe_modules(config, layer_type, expected, module, by_row)


def _probe_modules(
    config: object, layer_type: str | None, expected: PositionEncoding | None, module: nn.Module | None, by_row: bool
) -> RotationReport:
    built, failures = _configuration(config), Failures()
    rope = getattr(built, "rope_parameters", None)
    kinds = {kind: one for kind, one in rope.items() if one is not None} if isinstance(rope, dict) else {}
    by_type, note = [isinstance(one, dict) for one in kinds.values()], None
    if layer_type is not None and by_type and not any(by_type):
        got = f"got {short_repr(layer_type)} for layer_type, but all layers have the same rope parameters"
        raise RangeError(got, Remedy(layer_type=None))
    if by_type and all(by_type):  # layer types have different parameters
        if layer_type is None:
            layer_type, note = _first_layer_type(built, [*kinds])
        one_of("layer_type", layer_type, kinds)
    with torch.no_grad(), torch.device("cpu"):
        for each in _rotary_modules(built, failures) if module is None else (module,):
            subject = find_subject(each, failures, config=built, layer_type=layer_type)
            if subject is not None:
                return _with_note(_probe_rotation(subject, expected, by_row=by_row), note)
    raise _refusal(config, built, failures)


def _first_layer_type(config: Any, kinds: Sequence[str]) -> tuple[str, str | None]:
    """Return the type of the first layer with rotary positions, and a note if there are other types.

    The order of the keys in a configuration has no meaning. A GGUF file of Gemma 3 has another order.
    """
    of_layers = [each for each in getattr(config, "layer_types", None) or () if each in kinds]
    chosen = next(iter(of_layers), min(kinds))
    others = sorted({*(of_layers or kinds)} - {chosen})
    note = f"This holds for layers of type {chosen}. Other types: {', '.join(others)}."
    return chosen, note if others else None


def _with_note(report: RotationReport, note: str | None) -> RotationReport:
    """Put a note before the note of a report."""
    return report if note is None else replace(report, note=note if report.note is None else f"{note} {report.note}")


def _refusal(config: object, built: object, failures: Failures) -> InputError:
    """Return the error that states why this configuration could not be measured."""
    stated = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", config)
    name, remedy = (
        short_repr(stated),
        PythonRemedy(
            "locant.probe(lambda x, positions: ..., head_dim=64), with a function of that model",
            words="use locant explain, which reads the configuration",
        ),
    )
    if built is None:
        got = f"got a configuration of {name}, which the installed transformers does not know"
        return InputError(got, f"install a newer transformers, or use {remedy}")
    if not failures:
        return InputError(f"got {name}, whose code in transformers has no rotary module", remedy)
    errors = "; ".join(f"{call} raised {type(error).__name__}: {error}" for call, error in failures.items())
    got = f"got {name}, whose rotary module in transformers cannot be built or called with this configuration"
    return InputError(f"{got}: {errors}", remedy)


def _configuration(config: object) -> Any:
    """Return the `transformers` configuration or its text part, or ``None`` if `transformers` has no class for it."""
    if not is_installed("transformers"):
        return None
    built: Any = config
    if isinstance(config, Mapping):
        from transformers import CONFIG_MAPPING

        name = config.get("model_type")
        if not isinstance(name, str) or name not in CONFIG_MAPPING:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns about older keys
                built = CONFIG_MAPPING[name](**{key: value for key, value in config.items() if key != "model_type"})
                built.to_dict()  # fails for some values that the class accepts
        except Exception as error:  # a configuration can make transformers fail in any way
            got = f"got a {name} configuration that transformers refuses: {error}"
            raise InputError(got, "call transformers.AutoConfig.from_pretrained, whose error names the key") from error
    elif not type(config).__module__.startswith("transformers.models."):
        return None
    try:
        return built.get_text_config()
    except ValueError:  # it has several text parts
        return built


def _rotary_modules(config: Any, failures: Failures) -> Iterator[nn.Module]:
    """Yield the rotary modules in the Python file of a configuration.

    The modules whose constructor names the class of the configuration come first.
    """
    place = type(config).__module__.replace(".configuration_", ".modeling_")
    if config is None or find_spec(place) is None:
        return
    classes = [cls for cls in vars(importlib.import_module(place)).values() if inspect.isclass(cls)]
    rotary: list[Any] = [cls for cls in classes if cls.__module__ == place and _is_rotary(cls)]

    def is_named(cls: type) -> bool:
        return any(type(config).__name__ in str(one.annotation) for one in inspect.signature(cls).parameters.values())

    others = [part for part in PARTS if part not in type(config).__name__]
    text_classes = [cls for cls in rotary if not any(part in cls.__name__ for part in others)]
    for cls in sorted(text_classes or rotary, key=is_named, reverse=True):
        try:
            with torch.device("cpu"):
                module = cls(config)
        except CALL_ERRORS as error:
            failures.setdefault(f"{cls.__name__}(config)", error)
            continue
        yield module


def _rotary_module_in(model: object) -> nn.Module | None:
    """Return the first rotary module inside a model of `transformers`."""
    if not isinstance(model, nn.Module) or getattr(getattr(model, "config", None), "model_type", None) is None:
        return None
    return next((module for module in model.modules() if module is not model and _is_rotary(type(module))), None)


def _is_rotary(cls: type) -> bool:
    name = cls.__name__
    return issubclass(cls, nn.Module) and ROTARY_CLASS_NAME.search(name) is not None and "Attention" not in name
