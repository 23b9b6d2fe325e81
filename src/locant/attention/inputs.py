"""`AttentionInputs`: the checked arguments of `attend`, for backends. `AttentionResult`: the result of a backend.

The arguments of `attend` are checked here before anything is computed, because errors of torch's kernels do not state
the cause.

Values at padding may be anything, including NaN in uninitialised memory. A weight of 0 hides a finite number, but it
does not hide NaN or infinity, in the output or in gradients. So backends use the result of `without_padding`, in which
queries, keys and values are zeros at padding. The gradients at padding are exactly zero. This costs a copy of each
tensor if there is padding. On a device and in compiled code it costs a copy if there may be padding, because the
positions are not read. Strides affect the last bits of results. So if there are documents, all tensors get the memory
order of such copies.

Decoding is the exception, because a copy of a cache's keys would take ten times as long as the attention of one query.
So keys and values are not copied in calls without gradients and with 16 or more keys per query. `KVCache` stores zeros
at padding, so its results do not change. Any other cache must contain finite numbers at padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.masked import MaskedTensor

from locant.arguments import Real, real, scale_of, shape_error, short_repr
from locant.attention.mask import AttentionMask
from locant.errors import RangeError, ShapeError
from locant.kernels.transforms import hides_gradient, is_differentiated, is_plain_eager, may_be_differentiated
from locant.positions import PositionEncoding, Positions
from locant.positions.base import effective_score_bias
from locant.positions.documents import PADDING
from locant.positions.score_bias import ScoreBias
from locant.spelling import dtype_name
from locant.tensors import bounds, require_arithmetic, require_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that torch can multiply. It can only store float8."""
FEWEST_KEYS = 16
"""The smallest number of keys per query in decoding. With fewer keys, the copy costs a fraction of the attention."""
DENSE = {
    "masked": "x.to_tensor(0.0), and Positions.from_mask(...) for the hidden entries",
    "nested": "torch.nested.to_padded_tensor(x, 0.0), and Positions.from_mask(...) for the padding",
}
"""The remedy for masked and nested tensors: how to make them dense."""


class AttentionResult(NamedTuple):
    """The result of a backend."""

    y: Float[Tensor, "batch heads query value_dim"]
    """The output, in the dtype of `q`."""
    lse: Float[Tensor, "batch heads query"] | None = None
    """The log-sum-exp of the scores of every query, in float32 at least, if `needs_lse` is set."""
    weights: Float[Tensor, "batch heads query key"] | None = None
    """The weights before dropout, in float32 at least, if `return_weights` is set."""


def concatenate(parts: Sequence[AttentionResult], dim: int) -> AttentionResult:
    """Concatenate the results for several rows, or for several groups of queries."""
    if len(parts) == 1:
        return parts[0]
    y, *others = ([x for x in each if x is not None] for each in zip(*parts, strict=True))
    return AttentionResult(torch.cat(y, dim), *(torch.cat(each, dim) if each else None for each in others))


NEEDS_LSE = "the log-sum-exp, which sinks, return_lse=True and encodings with several outputs to merge (PaTH) need"
"""What some kernels do not return, for their errors."""


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of a backend, which computes ``softmax(cap(q k^T scale) + bias) v``. `attend` adds sinks later."""

    q: Float[Tensor, "batch heads query head_dim"]
    k: Float[Tensor, "batch kv_heads key head_dim"]
    v: Float[Tensor, "batch kv_heads key value_dim"]
    mask: AttentionMask
    encoding: PositionEncoding | None = None
    scale: Real = 1.0
    dropout_p: Real = 0.0
    return_weights: bool = False
    softcap: Real | None = None
    needs_lse: bool = False
    """True if the caller, the sinks or a merge of several outputs need the log-sum-exp."""

    @property
    def num_scores(self) -> int:
        """The number of scores, over all rows and heads."""
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[2]

    @property
    def is_grouped(self) -> bool:
        """Return whether several query heads share a key head."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def bias(self) -> ScoreBias | None:
        """The encoding's bias on the scores. The encoding is called once."""
        if self.encoding is None:
            return None
        memo = self._memo
        if "asked" not in memo:
            memo["asked"] = effective_score_bias(self.encoding, self.q, self.k, self.mask.queries, self.mask.keys)
        return memo["asked"]

    @property
    def _memo(self) -> dict[str, Any]:
        # In Python 3.11, `functools.cached_property` has a lock that the compiler cannot trace. A graph computes the
        # bias once anyway.
        return {} if torch.compiler.is_compiling() else vars(self)

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Return inputs with other vectors of the same tokens, such as zeros at padding.

        The encoding is called again only if its bias contains vectors of queries or keys.
        """
        if q is self.q and k is self.k and v is self.v:
            return self
        inputs = AttentionInputs(
            q, k, v, self.mask, self.encoding, self.scale, self.dropout_p, self.return_weights, self.softcap,
            self.needs_lse,
        )  # fmt: skip
        bias = self._memo.get("asked")
        if bias is not None and (same_bias := bias.for_vectors(q, k)) is not None:
            vars(inputs)["asked"] = same_bias
        return inputs

    def cap_scores(self, scores: Tensor) -> Tensor:
        """Bound scaled scores to ``-softcap`` and ``softcap``, before a bias is added."""
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def tile(self, start: int, stop: int) -> AttentionInputs:
        """Return the inputs for the queries ``start:stop`` and the keys that they attend to."""
        mask, keys = self.mask.tile(start, stop)
        q, k, v = self.q[:, :, start:stop], self.k[:, :, keys], self.v[:, :, keys]
        return dataclasses.replace(self, q=q, k=k, v=v, mask=mask)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """All tensors that the result depends on."""
        return self.q, self.k, self.v, *(() if self.bias is None else (x for x in self.bias.sources if x is not None))

    @property
    def needs_gradient(self) -> bool:
        """Return whether ``backward`` may be called on the result."""
        return torch.is_grad_enabled() and any(x.requires_grad or hides_gradient(x) for x in self.sources)

    @property
    def is_transformed(self) -> bool:
        """Return whether forward mode or `torch.func` computes a derivative. ``backward`` does not count."""
        return may_be_differentiated() and is_differentiated(*self.sources)

    def without_padding(self) -> AttentionInputs:
        """Return inputs with zeros at padding. In decoding, keys and values stay as they are."""
        return self._replace_if_documents(lambda positions, x: zero_padding(positions, x.contiguous())[0], None)

    def with_padding_order(self, is_decoding: bool | None = None) -> AttentionInputs:
        """Return inputs in the memory order of copies with zeros at padding, if there are documents."""
        return self._replace_if_documents(lambda _, x: x.contiguous(), is_decoding)

    def with_zero_padding(self, is_decoding: bool | None = None) -> AttentionInputs:
        """Return inputs with zeros at padding, in any memory order."""
        return self._replace_if_documents(lambda positions, x: zero_padding(positions, x)[0], is_decoding)

    def _replace_if_documents(self, change: Callable[..., Tensor], is_decoding: bool | None) -> AttentionInputs:
        queries, keys = self.mask.queries, self.mask.keys
        if queries.document_or_none is None and keys.document_or_none is None:
            return self
        q, k, v = self.q, self.k, self.v
        if queries.document_or_none is not None:
            q = change(queries, q)
        # Documents are checked first, because `is_decoding` adds a guard to a compiled graph.
        if keys.document_or_none is not None and not (self.is_decoding if is_decoding is None else is_decoding):
            k, v = change(keys, k), change(keys, v)
        return self.with_tensors(q, k, v)

    @property
    def is_decoding(self) -> bool:
        """Return whether there are few queries per key and no gradients. Then `k` and `v` are not copied.

        This depends on shapes and on which tensors need a gradient, so that compiled code does not read values.
        """
        if torch.compiler.is_exporting():
            return False  # an exported program must work for every length
        if FEWEST_KEYS * self.q.shape[2] > self.k.shape[2]:
            return False
        return is_plain_eager() or not (self.needs_gradient or self.is_transformed)


def zero_padding(
    positions: Positions, *tensors: Float[Tensor, "batch _ seq _"]
) -> tuple[Float[Tensor, "batch _ seq _"], ...]:
    """Return the tensors with zeros at padding, or unchanged if there cannot be any padding.

    >>> where = Positions.of([0, 0, 1], document=[-1, 0, 0])
    >>> zero_padding(where, torch.full((1, 1, 3, 1), torch.nan))[0].flatten()
    tensor([0., nan, nan])
    """
    padding = padding_or_none(positions)
    return tensors if padding is None else tuple(_fill(x, padding[:, None, :, None]) for x in tensors)


def padding_or_none(positions: Positions) -> Bool[Tensor, "batch seq"] | None:
    """Return which tokens are padding, or ``None`` if there cannot be any padding."""
    document = positions.document_or_none
    if document is None or bounds(document)[0] not in (None, PADDING):
        return None
    return document == PADDING


def _fill(x: Tensor, padding: Tensor) -> Tensor:
    """Return `x` with zeros at padding. torch cannot fill 8-bit dtypes, so their bytes are set to 0."""
    if x.dtype.itemsize > 1:
        return x.masked_fill(padding, 0.0)
    return x.view(torch.uint8).masked_fill(padding, 0).view(x.dtype)


def require_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise unless the shapes, dtypes and devices of queries, keys and values fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not (isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested) or isinstance(x, MaskedTensor):
            raise _non_dense_error(name, x)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        got = f"got {_shapes(q, k, v)}, expected (batch, heads, seq, head_dim) each"
        raise ShapeError(got, "x.view(batch, seq, heads, -1).transpose(1, 2)")
    if q_shape[0] != k_shape[0] or k_shape[:3] != v_shape[:3] or q_shape[-1] != k_shape[-1]:
        got = f"got {_shapes(q, k, v)}, expected one batch, one length for k and v, one head_dim for q and k"
        raise ShapeError(got, "pass keys and values of the same tokens")
    if q_shape[-1] == 0:
        remedy = "head_dim = d_model // num_heads"
        raise ShapeError(f"got {_shapes(q, k, v)}, expected a head_dim of 1 or more", remedy)
    if k_shape[1] == 0 or q_shape[1] % k_shape[1]:
        got = f"got {q_shape[1]} query heads for {k_shape[1]} key heads, expected a multiple"
        raise ShapeError(got, "num_heads % num_kv_heads == 0")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        dtypes = ", ".join(dtype_name(x.dtype) for x in (q, k, v))
        got = f"got q, k, v of {dtypes} on {q.device}, {k.device}, {v.device}"
        expected = "expected one dtype, floating-point of 16 bits or more, and one device"
        raise ShapeError(f"{got}, {expected}", "k.to(q), v.to(q)" if q.dtype in DTYPES else "q.bfloat16()")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _non_dense_error(name: str, x: Any) -> ShapeError:
    """Return the error for a value that is not a dense tensor."""
    require_tensor(name, x)
    if isinstance(x, MaskedTensor):
        kind = "masked"
    else:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").lstrip("_")
    return ShapeError(f"got {name} as a {kind} tensor, expected a dense one", DENSE.get(kind, "x.to_dense()"))


def require_encoding(encoding: Any) -> None:
    """Raise unless this is an encoding or ``None``. A module around an encoding hides the encoding's bias."""
    if encoding is None or isinstance(encoding, PositionEncoding):
        return
    if isinstance(encoding, type):
        cause, remedy = f"the class {encoding.__name__}", f"{encoding.__name__}(num_heads)"
    elif isinstance(encoding, torch.nn.Module):
        remedy = "pass the encoding itself, and wrap or compile the caller of attend"
        cause = f"a module {type(encoding).__name__}"
    else:
        cause, remedy = short_repr(encoding), "locant.encoding(name, ...)"
    raise RangeError(f"got {cause} for encoding, expected a PositionEncoding or None", remedy)


def require_keys_between(encoding: PositionEncoding | None, mask: AttentionMask) -> None:
    """Raise if the bias depends on the keys between a key and its query, and some of them are known to be missing."""
    if encoding is not None and encoding.needs_all_keys and mask.skips_tokens:
        name = type(encoding).__name__
        got = f"got k_positions {mask.keys} for {mask.queries}, and {name} counts all keys from a key to its query"
        remedy = "pass all keys in one call instead of parts for merge; or Positions.of(index, order=...) with an order"
        raise RangeError(got, f"{remedy} that counts the existing tokens")


def check_scale(scale: Any, head_dim: int) -> Real:
    """Return the factor of the scores."""
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise RangeError("got a scale that requires a gradient, which it would not get", "attend(q * scale, scale=1.0)")
    return scale_of(scale, float(head_dim) ** -0.5)


def check_softcap(softcap: Any) -> Real | None:
    """Return the bound of the scores, or ``None``."""
    if isinstance(softcap, Tensor) and softcap.requires_grad:
        raise RangeError("got a softcap that requires a gradient, which it would not get", "softcap.item()")
    return None if softcap is None else real("softcap", softcap, above=0, remedy="softcap=None for no bound")


def check_dropout(dropout_p: Any) -> Real:
    """Return the probability of dropping a weight."""
    return real("dropout_p", dropout_p, low=0, below=1, remedy="dropout_p=0.0 outside training")


def check_sinks(sinks: Any, q: Tensor) -> Float[Tensor, " heads"] | None:
    """Return one logit for each query head, in float32 at least, or ``None``."""
    if sinks is None:
        return None
    require_arithmetic("sinks", sinks)
    if sinks.shape != q.shape[1:2]:
        raise shape_error("sinks", sinks, f"({q.shape[1]},)", "pass one logit for each query head")
    if sinks.device != q.device:
        raise ShapeError(f"got sinks on {sinks.device}, expected the device of q, {q.device}", "sinks.to(q.device)")
    return sinks.to(torch.promote_types(q.dtype, torch.float32))
