"""What does attention with a bias cost, beside plain causal attention without one?

Time, and the most memory that was allocated meanwhile. Forward and backward, queries, keys and values of one size;
on a GPU 16,384 tokens in bfloat16 through FlexAttention. It refuses to report where a contender's result, or one of its
gradients where it is trained, is not that of the attention it stands for, written out in float64.
``PYTHONPATH=src python -m benchmarks attention``
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Row, measure
from locant import ALiBi, Fire, Fox, Inkling, Kerple, PositionEncoding, Positions, T5Bias, attend
from locant.positions.hidden_bias import HiddenBias

__all__ = ["rows"]

HEADS, HEAD_DIM = 8, 64
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
FORWARD, TRAINING = (16_384, 16_384) if CUDA else (8_192, 4_096)
FEW = 32
"""Queries that are looked at."""
CHECKED = 1_024
"""Tokens of the check of sinks and soft caps, enough for the kernels of long rows."""
NEAR = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
SLOW = 0.9
"""Seconds above which a contender is timed once, so that all rows take two minutes."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows() -> list[Row]:
    """Forward alone without gradients, of rows of every kind, then forward and backward; one token: `decoding`."""
    if importlib.util.find_spec("x_transformers") is None:
        print("not installed, and so not measured: x-transformers")
    return [*_forward(), *_arranged(), *_training(), *_beside_softmax()]


def _forward() -> list[Row]:
    alibi, t5, positions = ALiBi(HEADS), T5Bias(HEADS).to(DEVICE), Positions.arange(FORWARD, device=DEVICE)
    contenders = {
        "plain causal SDPA, without a bias": _plain,
        "ALiBi, locant auto": _ours(alibi, positions, "auto"),
        "ALiBi, locant flex": _ours(alibi, positions, "flex"),
        "T5, locant auto": _ours(t5, positions, "auto"),
        "FIRE, locant tiled": _ours(Fire(HEADS).to(DEVICE), positions, "tiled"),
        **{f"{name}, locant auto": _ours(each, _read(each, positions), "auto") for name, each in _hidden().items()},
        "ALiBi, matrix through SDPA": _ours(alibi, positions, "sdpa"),
        **({"ALiBi, x-transformers": _peer(FORWARD)} if importlib.util.find_spec("x_transformers") else {}),
    }
    q, k, v = _drawn(FORWARD)
    for name, contender in contenders.items():
        _require_right(name, contender, q, k, v)
    question = f"attention, forward, {HEADS} heads of {HEAD_DIM}, {FORWARD} tokens, {DTYPE}, {DEVICE}"
    return _with_memory(question, {name: _without_gradients(each, q, k, v) for name, each in contenders.items()})


def _arranged() -> list[Row]:
    """Rows as they come from a tokenizer and from `Windows`."""
    half, quarter = TRAINING // 2, TRAINING // 4
    kinds = {
        "one document": Positions.arange(TRAINING, device=DEVICE),
        "a mask of ones": Positions.from_mask(torch.ones(1, TRAINING, device=DEVICE)),
        "10 tokens of padding before": Positions.from_mask(torch.arange(TRAINING, device=DEVICE)[None] >= 10),
        "2 documents": Positions.packed([half, half], device=DEVICE),
        "7 documents": Positions.packed([half, 64, quarter - 64, 200, 100, 80, quarter - 380], device=DEVICE),
    }
    encodings = {"ALiBi": ALiBi(HEADS), "T5": T5Bias(HEADS).to(DEVICE), "FIRE": Fire(HEADS).to(DEVICE)}
    contenders: dict[str, Attention] = {"plain causal SDPA, without a bias": _plain}
    for name, encoding in encodings.items():
        contenders |= {f"{name}, {kind}": _ours(encoding, where, "auto") for kind, where in kinds.items()}
    q, k, v = _drawn(TRAINING)
    for name, contender in contenders.items():
        _require_right(name, contender, q, k, v)
    question = (
        f"attention, forward, rows of every kind, {HEADS} heads of {HEAD_DIM}, {TRAINING} tokens, {DTYPE}, {DEVICE}"
    )
    return _with_memory(question, {name: _without_gradients(each, q, k, v) for name, each in contenders.items()})


def _training() -> list[Row]:
    positions = Positions.arange(TRAINING, device=DEVICE)
    hidden = _hidden()
    encodings: dict[str, PositionEncoding] = {
        "ALiBi": ALiBi(HEADS),
        "ALiBi with learned slopes": ALiBi(HEADS, learned=True).to(DEVICE),
        "T5": T5Bias(HEADS).to(DEVICE),
        "KERPLE": Kerple(HEADS).to(DEVICE),
        "FIRE": Fire(HEADS).to(DEVICE),
    }
    contenders = {
        "plain causal SDPA, without a bias": _plain,
        **{f"{name}, locant auto": _ours(each, positions, "auto") for name, each in encodings.items()},
        **{f"{name}, locant auto": _ours(each, _read(each, positions), "auto") for name, each in hidden.items()},
        "ALiBi, matrix through SDPA": _ours(encodings["ALiBi"], positions, "sdpa"),
        "T5, matrix through SDPA": _ours(encodings["T5"], positions, "sdpa"),
        "T5, written out (eager)": _ours(encodings["T5"], positions, "eager"),
    }
    q, k, v = (x.requires_grad_() for x in _drawn(TRAINING))
    cotangent = torch.randn_like(q)
    for name, contender in contenders.items():
        _require_right_gradients(name, contender, q, k, v)

    def run(attention: Attention) -> Callable[[], object]:
        def step() -> None:
            attention(q, k, v).backward(cotangent)
            q.grad = k.grad = v.grad = None
            _wait()

        return step

    question = f"attention, forward and backward, {HEADS} heads of {HEAD_DIM}, {TRAINING} tokens, {DTYPE}, {DEVICE}"
    return _with_memory(question, {name: run(each) for name, each in contenders.items()})


def _beside_softmax() -> list[Row]:
    """The log-sum-exp, sinks and a soft cap, forward and backward."""
    sinks = torch.randn(HEADS, device=DEVICE, requires_grad=True)
    kinds: dict[str, dict[str, Any]] = {
        "the log-sum-exp": {"return_lse": True},
        "sinks": {"sinks": sinks},
        "a soft cap": {"softcap": 30.0},
        "ALiBi, sinks and a soft cap": {"encoding": ALiBi(HEADS), "sinks": sinks, "softcap": 30.0},
    }
    for name, options in kinds.items():
        _require_right_beside_softmax(name, options, sinks)
    q, k, v = (x.requires_grad_() for x in _drawn(TRAINING))
    positions, cotangent = Positions.arange(TRAINING, device=DEVICE), torch.randn_like(q)

    def run(attention: Callable[[], Tensor | tuple[Tensor, ...]]) -> Callable[[], object]:
        def step() -> None:
            y = attention()
            (y if isinstance(y, Tensor) else y[0]).backward(cotangent)
            q.grad = k.grad = v.grad = sinks.grad = None
            _wait()

        return step

    contenders = {"plain causal SDPA, without a bias": run(lambda: _plain(q, k, v))}
    for name, options in kinds.items():
        contenders[name] = run(lambda options=options: attend(q, k, v, positions=positions, **options))
    question = f"attention beside the softmax, forward and backward, {HEADS} heads of {HEAD_DIM}, {TRAINING} tokens"
    return _with_memory(f"{question}, {DTYPE}, {DEVICE}", contenders)


# ---------------------------------------------------------------------- contenders


def _drawn(length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (3, 1, HEADS, length, HEAD_DIM)
    q, k, v = torch.randn(shape, device=DEVICE).to(DTYPE)
    return q, k, v


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _hidden() -> dict[str, HiddenBias]:
    """Those whose bias follows from hidden states."""
    width = HEADS * HEAD_DIM
    return {"FoX": Fox(HEADS, width).to(DEVICE), "Inkling": Inkling(HEADS, width).to(DEVICE)}


def _read(encoding: HiddenBias, positions: Positions) -> Positions:
    """With what is read of random hidden states, which is not measured: it is a projection, as that of the queries."""
    with torch.no_grad():
        read = encoding.read(torch.randn(1, positions.seq_len, encoding.d_model, device=DEVICE), positions)
    for each in _features(read):
        each.requires_grad_()
    return read


def _features(positions: Positions) -> list[Tensor]:
    """The features of the tokens, as queries and as keys."""
    return [each for each in (positions.read.of_query, positions.read.of_key) if each is not None]


def _ours(
    encoding: PositionEncoding | None, positions: Positions, backend: str, keys: Positions | None = None
) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, encoding=encoding, positions=positions, k_positions=keys, backend=backend)  # type: ignore[call-overload]

    attention.encoding, attention.positions, attention.keys = encoding, positions, keys  # type: ignore[attr-defined]
    return attention


def _without_gradients(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v)
            _wait()

    return forward


def _peer(length: int) -> Attention:
    """Its ALiBi as a user of x-transformers has it: a matrix, handed to its fused attention."""
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import AlibiPositionalBias

    bias = AlibiPositionalBias(HEADS, HEADS).to(DEVICE)
    fused = Attend(causal=True, flash=True, heads=HEADS)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused(q, k, v, attn_bias=bias(length, length).to(q.dtype))[0]

    attention.encoding = ALiBi(HEADS)  # type: ignore[attr-defined]
    return attention


# ---------------------------------------------------------------------- measuring


def _require_right(name: str, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The last queries."""
    with torch.no_grad():
        truth = _written_out(attention, q[:, :, -FEW:].double(), k.double(), v.double())
        error = float((attention(q, k, v)[:, :, -FEW:].double() - truth).abs().max())
    assert error < NEAR[q.dtype], f"{name} is off by {error}"


def _require_right_gradients(name: str, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    """With a cotangent for the last queries: every gradient there is, that of a table or an MLP included."""
    learned = _learned(attention)
    cotangent = torch.zeros_like(q)
    cotangent[:, :, -FEW:] = torch.randn_like(cotangent[:, :, -FEW:])
    found = torch.autograd.grad(attention(q, k, v), [q, k, v, *learned], cotangent)
    wide = [x.detach().double().requires_grad_() for x in (q[:, :, -FEW:], k, v)]
    y = _written_out(attention, *wide)
    truth = torch.autograd.grad(y, [*wide, *learned], cotangent[:, :, -FEW:].double())
    assert not found[0][:, :, :-FEW].any(), f"{name} has gradients for queries that were not asked"
    for ours, wanted in zip((found[0][:, :, -FEW:], *found[1:]), truth, strict=True):
        error = float((ours.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        assert error < NEAR[q.dtype], f"a gradient of {name} is off by {error} of its largest"


def _require_right_beside_softmax(name: str, options: dict[str, Any], sinks: Tensor) -> None:
    """Compare outputs and gradients with plain torch in float64, for `CHECKED` tokens."""
    inputs = [x.requires_grad_() for x in _drawn(CHECKED)]
    used = [*inputs, sinks] if "sinks" in options else inputs
    found = attend(*inputs, positions=Positions.arange(CHECKED, device=DEVICE), **options)
    found, lse = (found[0], found[1]) if isinstance(found, tuple) else (found, None)
    wide = [x.detach().double().requires_grad_() for x in used]
    scores = wide[0] @ wide[1].mT * HEAD_DIM**-0.5
    if (softcap := options.get("softcap")) is not None:
        scores = (scores / softcap).tanh() * softcap
    distance = torch.arange(CHECKED, device=DEVICE)[:, None] - torch.arange(CHECKED, device=DEVICE)
    if "encoding" in options:
        slopes = 2.0 ** -torch.arange(1.0, HEADS + 1, dtype=torch.float64, device=DEVICE)
        scores = scores - slopes[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, float("-inf"))
    if "sinks" in options:
        scores = torch.cat([scores, wide[3][None, :, None, None].expand(1, -1, CHECKED, 1)], -1)
    expected = scores.softmax(-1)[..., :CHECKED] @ wide[2]
    cotangent = torch.randn_like(found)
    ours = (found, *torch.autograd.grad(found, used, cotangent, retain_graph=True))
    theirs = (expected, *torch.autograd.grad(expected, wide, cotangent.double(), retain_graph=True))
    if lse is not None:
        ours, theirs = (*ours, lse), (*theirs, scores.logsumexp(-1))
    for x, wanted in zip(ours, theirs, strict=True):
        error = float(((x.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)).detach())
        assert error < NEAR[DTYPE], f"{name} is off by {error}"


def _learned(attention: Attention) -> list[Tensor]:
    """Parameters; of an encoding that reads hidden states those that attention sees, and what was read."""
    encoding, positions = getattr(attention, "encoding", None), getattr(attention, "positions", None)
    if not isinstance(encoding, HiddenBias) or positions is None:
        return [] if encoding is None else list(encoding.parameters())
    seen = [encoding.curves] if isinstance(encoding, Inkling) else []
    return [*seen, *_features(positions)]


def _written_out(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the last queries get, in the dtype they come in."""
    encoding, length, few = getattr(attention, "encoding", None), k.shape[2], q.shape[2]
    where = getattr(attention, "positions", Positions.arange(length, device=DEVICE))
    keys = getattr(attention, "keys", None) or where
    where = where.slice(where.seq_len - few, where.seq_len)
    return attend(q, k, v, encoding=encoding, positions=where, k_positions=keys, backend="eager")


def _with_memory(question: str, contenders: dict[str, Callable[[], object]]) -> list[Row]:
    peaks = {name: round(_peak(run) / 1e6, 1) for name, run in contenders.items()}  # these runs warm up, too
    rows = measure(question, contenders, rounds=3, warmup=0, once_above=SLOW)
    return [dataclasses.replace(row, megabytes=peaks[row.contender]) for row in rows]


def _peak(run: Callable[[], object]) -> int:
    """The most bytes that were held at a time of what was allocated during the run."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # torch's stub lacks it
        peak = max(peak, held)
    return peak


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()
