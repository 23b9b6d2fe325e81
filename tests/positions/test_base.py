"""The base class of all encodings does nothing to anything."""

from __future__ import annotations

import torch

from locant import PositionEncoding, Positions


def test_the_base_class_is_nope() -> None:
    encoding, positions = PositionEncoding(), Positions.packed([2, 3])
    x, q, k = torch.randn(1, 5, 7), torch.randn(1, 4, 5, 6), torch.randn(1, 2, 5, 6)
    assert encoding.embed(x, positions) is x
    turned_q, turned_k = encoding.rotate(q, k, positions)
    assert turned_q is q
    assert turned_k is k
    assert encoding.bias(q, k, positions) is None
    assert encoding.score_mod(q, k, positions) is None
    assert not list(encoding.parameters())
