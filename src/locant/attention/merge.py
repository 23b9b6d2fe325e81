"""`merge`: attention over all keys out of attention over parts of them.

The output over some keys is a mean of their values, and the log-sum-exp of their scores is the logarithm of what that
mean was divided by. So outputs over disjoint sets of keys are joined by a mean of themselves: chunks of a long cache, a
prompt that many sequences share, the shards that come around a ring of devices. A sink is one more part, without a
value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import entries, shape_error, shown
from locant.errors import ShapeError
from locant.spelling import dtype_name
from locant.tensors import require_arithmetic

Output = Float[Tensor, "batch heads query value_dim"]
LogSumExp = Float[Tensor, "batch heads query"]


def merge(parts: Sequence[tuple[Output, LogSumExp]]) -> tuple[Output, LogSumExp]:
    """The output and the log-sum-exp over all keys, from those over disjoint sets of keys.

    Exact up to rounding, in any order, and differentiable. A query without a key in some of the parts gets what the
    others say; without one in any, zeros and minus infinity. Sinks are given to one of the parts, no more.

    Every part has to have the scores of the whole. So it has with every encoding but those whose class has
    `needs_all_keys`, such as `Cope`, which counts the keys between a key and its query: `attend` refuses to compute
    a part without them where it can tell from the positions. On a device, with positions that do not count one by one,
    in compiled code, and without a causal mask, where keys may be those of another sequence, it cannot, and what is
    joined is then something else than attention over all keys.

    Args:
        parts: what ``attend(..., return_lse=True)`` returns for one set of keys after another; at least one part. The
            log-sum-exp is minus infinity, and the output finite, where a query has no key.

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
    outputs, logarithms = _required(parts)
    portions, lse = shares(logarithms)
    y = outputs[0] * portions[0]
    for output, portion in zip(outputs[1:], portions[1:], strict=True):
        y = y + output * portion
    return y.to(outputs[0].dtype), lse


def shares(logarithms: Sequence[LogSumExp]) -> tuple[list[Float[Tensor, "batch heads query 1"]], LogSumExp]:
    """How much each part weighs in the whole, and the log-sum-exp of the whole.

    The greatest of the parts is a constant for derivatives, from which it cancels. Where all are minus infinity, 0 and
    1 stand in for it and for the sum, so that neither forward nor backward subtracts or divides what is infinite.
    """
    greatest = torch.stack([part.detach() for part in logarithms]).amax(0)
    none = greatest == float("-inf")
    greatest = greatest.masked_fill(none, 0.0)
    sums = [(part - greatest).exp() for part in logarithms]
    total = torch.stack(sums).sum(0).masked_fill(none, 1.0)
    return [(part / total)[..., None] for part in sums], (total.log() + greatest).masked_fill(none, float("-inf"))


def _required(parts: object) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and the log-sum-exps, these in float32 at least, where they belong together."""
    remedy = "merge([attend(..., return_lse=True), ...])"
    given = [entries("a part", part, remedy) for part in entries("parts", parts, remedy)]
    if not given or any(len(part) != 2 for part in given):
        sizes = [len(part) for part in given]
        raise ShapeError(f"got parts of {shown(sizes)} tensors, expected an output and a log-sum-exp each", remedy)
    for output, lse in given:
        for name, x in (("an output", output), ("a log-sum-exp", lse)):
            require_arithmetic(name, x)
        if output.ndim != 4 or output.shape != given[0][0].shape:
            shape = tuple(given[0][0].shape) if given[0][0].ndim == 4 else "(batch, heads, query, value_dim)"
            raise shape_error("an output", output, f"{shape} in every part", "parts of the same queries")
        if lse.shape != output.shape[:3]:
            raise shape_error("a log-sum-exp", lse, f"{tuple(output.shape[:3])}, as the output has it", remedy)
        if output.dtype != given[0][0].dtype or {output.device, lse.device} != {given[0][0].device}:
            got = f"got an output of {dtype_name(output.dtype)} on {output.device} with a log-sum-exp on {lse.device}"
            expected = f"expected {dtype_name(given[0][0].dtype)} on {given[0][0].device} in every part"
            raise ShapeError(f"{got}, {expected}", "part.to(...) first")
    return [output for output, _ in given], [lse.to(torch.promote_types(lse.dtype, torch.float32)) for _, lse in given]
