"""What `probe` says of code that fails, gives nothing, is random, or does nothing, and how far its answer holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locant
from locant import InputError
from tests.refusal import refuses

WIDTH = 16


def missing(key: str) -> Any:
    raise KeyError(key)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (lambda x, positions: 1 / 0, "f(x, positions) and f(q, k) and f(query_len, key_len) raised ZeroDivisionError"),
        (lambda x: missing("table"), "f(x) raised KeyError: 'table'"),
        (lambda q, k, positions: missing("table"), "f(q, k, positions) raised KeyError: 'table'"),
        (lambda x, positions: None, "gave None, which is no tensor"),
        (lambda x: None, "f(x) gave None, which is no tensor"),
        (lambda x, positions: x * torch.nan, "f(x, positions) gave NaN"),
        (lambda x, positions: x[..., :4], "f(x, positions) gave shape [1, 2, 3, 4] for tokens of shape [1, 2, 3, 16]"),
    ],
)  # fmt: skip
def test_a_call_that_fails_is_named_with_its_own_error(target: Any, said: str) -> None:
    with refuses(InputError, "in any way of calling that is known", said):
        locant.probe(target, head_dim=WIDTH)


def test_the_error_of_the_code_is_the_cause() -> None:
    with pytest.raises(InputError) as caught:
        locant.probe(lambda x, positions: 1 / 0, head_dim=WIDTH)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_is_random_is_refused_before_it_is_measured() -> None:
    def bias(query_len: int, key_len: int) -> Tensor:
        return torch.randn(2, query_len, key_len)

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.dropout(x)

    for target in (lambda x: torch.randn_like(x), lambda q, k, positions: (q, torch.rand_like(k)), Dropped(), bias):
        with refuses(InputError, "two equal calls", ".eval()"):
            locant.probe(target, head_dim=WIDTH)
    assert locant.probe(Dropped().eval(), head_dim=WIDTH).encoding is None


def test_what_does_nothing_is_not_said_to_count() -> None:
    assert locant.probe(lambda x, positions: x, head_dim=WIDTH).warnings == (
        "It does nothing that depends on positions.",
    )


def test_the_encoding_that_is_named_rounds_as_was_found_and_says_how_far_it_was_compared() -> None:
    from transformers import LlamaConfig

    found = str(locant.probe(LlamaConfig(hidden_size=64, num_attention_heads=2)))
    assert "what explains it: float32(position) x float32(frequency)." in found
    assert "The same as Rotary(head_dim=32, base=10000, layout='half', angles='float32'), to " in found
    assert " on random tokens at positions up to 61." in found
