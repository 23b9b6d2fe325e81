"""`probe` calls any class, whatever it is named: rotary modules as tutorials and well-known repositories write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locant
from locant import InputError, Rotary
from locant.probing.report import RotationReport
from tests.refusal import refuses

D = 64
ROWS = 512


def angles(rows: int = ROWS, width: int = D) -> Tensor:
    return torch.outer(torch.arange(rows).float(), 10_000.0 ** -(torch.arange(0, width, 2) / width))


def interleaved(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class ApplyRoPE(nn.Module):
    """A learner's module; tokens are ``[..., seq, dim]``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", angles(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return interleaved(x, self.angles[: x.shape[-2]])


class MyEncoding(ApplyRoPE):
    """The same without a word of its kind in its name."""


class Wrapped(nn.Module):
    """A module that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ApplyRoPE()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class RotaryPositionalEmbedding(nn.Module):
    """Buffers of cosines and sines over the whole width; tokens are ``[batch, seq, dim]``."""

    def __init__(self, d: int = D, max_len: int = ROWS) -> None:
        super().__init__()
        angle = angles(max_len, d)
        self.register_buffer("cos_cached", torch.cat([angle, angle], -1).cos(), persistent=False)
        self.register_buffer("sin_cached", torch.cat([angle, angle], -1).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        _, seq, _ = x.shape
        return halves(x, self.cos_cached[:seq], self.sin_cached[:seq])


class HeadsBehind(RotaryPositionalEmbedding):
    """Tokens are ``[batch, seq, heads, dim]``."""

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        return halves(x, self.cos_cached[:seq, None], self.sin_cached[:seq, None])


class TokensFirst(RotaryPositionalEmbedding):
    """Tokens are ``[seq, batch, heads, dim]``, and half of a head is rotated."""

    def __init__(self) -> None:
        super().__init__(D // 2)

    def forward(self, x: Tensor) -> Tensor:
        seq, part = x.shape[0], D // 2
        cos, sin = self.cos_cached[:seq, None, None], self.sin_cached[:seq, None, None]
        return torch.cat([halves(x[..., :part], cos, sin), x[..., part:]], -1)


class OfAllRows(RotaryPositionalEmbedding):
    """Rows have to be as long as its tables."""

    def __init__(self) -> None:
        super().__init__(D, 128)

    def forward(self, x: Tensor) -> Tensor:
        return halves(x, self.cos_cached, self.sin_cached)


class Complex(nn.Module):
    """Complex numbers; tokens are ``[batch, seq, heads, dim]``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs_cis", torch.polar(torch.ones(ROWS, D // 2), angles()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.freqs_cis[: x.shape[1], None]).flatten(-2).type_as(x)


class ComplexAt(Complex):
    """The same from a position on, as with a cache."""

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        rows = self.freqs_cis[start_pos : start_pos + x.shape[1], None]
        return torch.view_as_real(pairs * rows).flatten(-2).type_as(x)


class WithTokenPositions(nn.Module):
    """A course's exercise: ``(x [..., seq, d_k], token_positions [..., seq])``."""

    def __init__(self, theta: float, d_k: int, max_seq_len: int) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(max_seq_len).float(), theta ** -(torch.arange(0, d_k, 2) / d_k))
        self.register_buffer("angle", angle, persistent=False)

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        return interleaved(x, self.angle[token_positions])


class WithInputPos(nn.Module):
    """torchtune's convention: ``(x [batch, seq, heads, dim], *, input_pos)``."""

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        rows = angles(1024)[: x.shape[1]] if input_pos is None else angles(1024)[input_pos]
        return interleaved(x, rows[None, :, None] if input_pos is None else rows[:, :, None])


class MakesTables(RotaryPositionalEmbedding):
    """GPT-NeoX's convention: tables of the first positions; a function in this file rotates by them."""

    def forward(self, x: Tensor, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        seq_len = x.shape[-2] if seq_len is None else seq_len
        return self.cos_cached[:seq_len], self.sin_cached[:seq_len]


class MakesTablesOfLength(MakesTables):
    """By the number of tokens alone."""

    def forward(self, seq_len: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.cos_cached[:seq_len], self.sin_cached[:seq_len]


class MakesMatrices(nn.Module):
    """A matrix for each position, by which each token is multiplied."""

    def forward(self, seq_len: int) -> Tensor:
        angle = angles(seq_len, 8)
        matrix = torch.zeros(seq_len, 8, 8)
        even, odd = torch.arange(0, 8, 2), torch.arange(1, 8, 2)
        matrix[:, even, even] = matrix[:, odd, odd] = angle.cos()
        matrix[:, even, odd], matrix[:, odd, even] = -angle.sin(), angle.sin()
        return matrix


def apply_rotary_to_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, cos, sin), halves(k, cos, sin)


def rotate_queries_and_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Su Jianlin's: tokens are ``[batch, heads, seq, dim]``, and positions are counted."""
    sinusoidal = torch.stack([angles(q.shape[2]).sin(), angles(q.shape[2]).cos()], -1).flatten(-2)
    cos, sin = (sinusoidal[:, begin::2].repeat_interleave(2, -1) for begin in (1, 0))

    def rotated(x: Tensor) -> Tensor:
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    return rotated(q), rotated(k)


def rotate_in_place(positions: Tensor, query: Tensor, key: Tensor) -> None:
    """vLLM's convention: flat tokens, written into."""
    rows = angles(2048)[positions][:, None]
    for x in (query, key):
        heads = x.view(len(x), -1, D)
        heads.copy_(halves(heads, torch.cat([rows, rows], -1).cos(), torch.cat([rows, rows], -1).sin()))


def of_one_row(x: Tensor) -> Tensor:
    seq, _ = x.shape
    return interleaved(x, angles(seq))


INTERLEAVED = Rotary(D, layout="interleaved")
WRITTEN: dict[str, tuple[Any, dict[str, Any], Rotary, str]] = {
    "[..., seq, dim]": (ApplyRoPE(), {}, INTERLEAVED, "f(x)"),
    "another name": (MyEncoding(), {}, INTERLEAVED, "f(x)"),
    "a module inside": (Wrapped(), {}, INTERLEAVED, "f(x)"),
    "a method": (ApplyRoPE().forward, {"head_dim": D}, INTERLEAVED, "f(x)"),
    "[batch, seq, dim]": (RotaryPositionalEmbedding(), {}, Rotary(D), "f(x) with tokens [batch, seq, dim]"),
    "[batch, seq, heads, dim]": (HeadsBehind(), {}, Rotary(D), "f(x)"),
    "[seq, batch, heads, dim]": (
        TokensFirst(), {}, Rotary(D, rotary_dim=D // 2), "f(x) with tokens [seq, batch, heads, dim]"),
    "[seq, dim]": (of_one_row, {}, INTERLEAVED, "f(x) with tokens [seq, dim]"),
    "rows of one length": (OfAllRows(), {}, Rotary(D), "f(x) of exactly 128 tokens"),
    "complex numbers": (Complex(), {}, INTERLEAVED, "f(x)"),
    "from a position on": (ComplexAt(), {}, INTERLEAVED, "f(x, start_pos=number of the first token)"),
    "token_positions": (WithTokenPositions(1e4, D, 2048), {}, INTERLEAVED, "f(x, positions)"),
    "input_pos": (WithInputPos(), {}, INTERLEAVED, "f(x, input_pos=positions)"),
    "tables by x": (MakesTables(), {}, Rotary(D), "module(x) makes tables, and apply_rotary_to_both rotates by them"),
    "tables by length": (
        MakesTablesOfLength(), {"apply": apply_rotary_to_both}, Rotary(D),
        "module(seq_len) makes tables, and apply_rotary_to_both rotates by them"),
    "a function of a length": (
        lambda seq_len: (angles(seq_len).cos(), angles(seq_len).sin()),
        {"apply": lambda x, cos, sin: interleaved(x, torch.atan2(sin, cos)), "head_dim": D}, INTERLEAVED,
        "f(seq_len) makes tables"),
    "a function of a width": (
        lambda dim, end: torch.polar(torch.ones(end, dim // 2), angles(end, dim)),
        {"apply": lambda x, freqs_cis: interleaved(x, freqs_cis.angle()), "head_dim": D}, INTERLEAVED,
        "f(head_dim, seq_len) makes tables"),
    "matrices": (MakesMatrices(), {}, Rotary(8, layout="interleaved"), "module(seq_len) makes matrices"),
    "both": (rotate_queries_and_keys, {"head_dim": D}, INTERLEAVED, "f(q, k)"),
    "in place": (
        rotate_in_place, {"head_dim": D}, Rotary(D), "f(positions, q, k) with tokens [tokens, heads, dim], in place"),
}  # fmt: skip


@pytest.mark.parametrize("written", WRITTEN)
def test_a_module_of_any_name_and_shape_is_probed(written: str) -> None:
    target, options, expected, called = WRITTEN[written]
    report = locant.probe(target, **options)
    assert isinstance(report, RotationReport)
    assert report.called.startswith(called)
    assert isinstance(report.encoding, Rotary)
    assert repr(report.encoding.replace(angles="exact")) == repr(expected)
    assert report.is_rotation


def test_what_is_no_rotation_and_ends_soon_is_reported_too() -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(512, D))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table[: x.shape[1]]

    report = locant.probe(Gates())
    assert report.encoding is None
    assert "each dimension is multiplied by a number that depends on the position" in report.warnings[0]


def test_what_was_tried_is_said_if_nothing_fits() -> None:
    class RotaryOfNothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with refuses(
        InputError,
        "f(x) returned shape [] for tokens of shape [1, 2, 3, 64]",
        "module(x [batch, seq, dim]) returned no tables",
    ):
        locant.probe(RotaryOfNothing())
    with refuses(InputError, "the class RotaryPositionalEmbedding, which has to be built", "probe(RotaryPositional"):
        locant.probe(RotaryPositionalEmbedding)
    with refuses(InputError, "makes tables of shape [3, 32]", "apply=apply_rotary"):
        locant.probe(locant_free_tables())


def locant_free_tables() -> Callable[..., Any]:
    """A module whose Python module has no function that rotates."""
    code: dict[str, Any] = {"__name__": "elsewhere", "nn": nn, "torch": torch}
    exec(  # noqa: S102
        "class Tables(nn.Module):\n"
        "    def forward(self, seq_len: int):\n"
        "        return torch.outer(torch.arange(seq_len).float(), torch.rand(32)).cos()\n",
        code,
    )
    return code["Tables"]()
