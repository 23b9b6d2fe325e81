"""`merge`: combine attention over disjoint sets of keys into attention over all keys.

The output over some keys is a weighted mean of their values. The log-sum-exp of their scores is the logarithm of the
sum that this mean was divided by. So a weighted mean combines outputs over disjoint sets of keys, such as chunks of a
long cache, a prompt that many sequences share, or the shards of a ring of devices. A sink is one more set, without a
value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import entries, shape_error, short_repr
from locant.errors import ShapeError
from locant.spelling import dtype_name
from locant.tensors import require_arithmetic

Output = Float[Tensor, "batch heads query value_dim"]
LogSumExp = Float[Tensor, "batch heads query"]


def merge(parts: Sequence[tuple[Output, LogSumExp]]) -> tuple[Output, LogSumExp]:
    """Return the output and the log-sum-exp over all keys, from outputs and log-sum-exps over disjoint sets of keys.

    The result is exact up to rounding, in any order, and differentiable. If a query has no key in some parts, the other
    parts determine its output. If a query has no key in any part, its output is zero and its log-sum-exp is minus
    infinity. Pass sinks in only one of the calls of `attend`.

    The scores of a part must be the same as in attention over all keys. This holds for all encodings without
    `needs_all_keys`. Encodings with it, such as `Cope`, count the keys between a key and its query. For these
    encodings, `attend` raises an error if the positions show that keys are missing. It cannot check this on a device
    with positions that do not count one by one, in compiled code, or without a causal mask, because the keys may then
    belong to another sequence. In these cases the merged result differs from attention over all keys.

    Args:
        parts: the results of ``attend(..., return_lse=True)`` for each set of keys, at least one. For a query without a
            key, the log-sum-exp is minus infinity and the output is finite.

    Returns:
        The output in the dtype of the parts, and the log-sum-exp in float32 at least.

    >>> from locant import Positions, attend
    >>> q, k, v = torch.randn(3, 1, 2, 6, 16)
    >>> def over(start, stop):
    ...     keys, values, where = k[:, :, start:stop], v[:, :, start:stop], Positions.arange(6).slice(start, stop)
    ...     return attend(q, keys, values, positions=Positions.arange(6), k_positions=where, return_lse=True)
    >>> torch.allclose(merge([over(0, 4), over(4, 6)])[0], attend(q, k, v, positions=Positions.arange(6)), atol=1e-6)
    True
    """
    outputs, logarithms = _check_parts(parts)
    fractions, lse = shares(logarithms)
    y = outputs[0] * fractions[0]
    for output, fraction in zip(outputs[1:], fractions[1:], strict=True):
        y = y + output * fraction
    return y.to(outputs[0].dtype), lse


def shares(logarithms: Sequence[LogSumExp]) -> tuple[list[Float[Tensor, "batch heads query 1"]], LogSumExp]:
    """Return each part's share of the whole, and the log-sum-exp of the whole.

    The greatest log-sum-exp is a constant in derivatives, because it cancels. If all parts are minus infinity, 0
    replaces the greatest log-sum-exp and 1 replaces the sum. So the forward and the backward pass do not subtract or
    divide infinite numbers.
    """
    greatest = torch.stack([part.detach() for part in logarithms]).amax(0)
    none = greatest == float("-inf")
    greatest = greatest.masked_fill(none, 0.0)
    sums = [(part - greatest).exp() for part in logarithms]
    total = torch.stack(sums).sum(0).masked_fill(none, 1.0)
    return [(part / total)[..., None] for part in sums], (total.log() + greatest).masked_fill(none, float("-inf"))


def _check_parts(parts: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the log-sum-exps in float32 at least. Raise unless all parts fit together."""
    remedy = "merge([attend(..., return_lse=True), ...])"
    pairs = [entries("a part", part, remedy) for part in entries("parts", parts, remedy)]
    if not pairs or any(len(part) != 2 for part in pairs):
        sizes = [len(part) for part in pairs]
        raise ShapeError(f"got parts of {short_repr(sizes)} tensors, expected an output and a log-sum-exp each", remedy)
    for output, lse in pairs:
        for name, x in (("an output", output), ("a log-sum-exp", lse)):
            require_arithmetic(name, x)
        if output.ndim != 4 or output.shape != pairs[0][0].shape:
            shape = tuple(pairs[0][0].shape) if pairs[0][0].ndim == 4 else "(batch, heads, query, value_dim)"
            raise shape_error("an output", output, f"{shape} in every part", "pass parts with the same queries")
        if lse.shape != output.shape[:3]:
            raise shape_error("a log-sum-exp", lse, f"{tuple(output.shape[:3])} as in the output", remedy)
        if output.dtype != pairs[0][0].dtype or {output.device, lse.device} != {pairs[0][0].device}:
            got = f"got an output of {dtype_name(output.dtype)} on {output.device} with a log-sum-exp on {lse.device}"
            expected = f"expected {dtype_name(pairs[0][0].dtype)} on {pairs[0][0].device} in every part"
            raise ShapeError(f"{got}, {expected}", "part.to(...) first")
    return [output for output, _ in pairs], [lse.to(torch.promote_types(lse.dtype, torch.float32)) for _, lse in pairs]
