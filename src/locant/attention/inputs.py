"""`AttentionInputs`: one call of `attend`, checked, as every backend gets it; `Attended`: what a backend gives back.

What `attend` accepts is checked here before anything is computed: errors of torch's kernels name no cause.

Values at padding may be anything, NaN in uninitialised memory included: a weight of 0 hides a finite number, but
neither NaN nor infinity, forward or in gradients. So backends get `without_padding`: queries, keys and values
are zeros at padding, which therefore gets a gradient of exactly zero. That costs a copy of each, where there is padding
or, on a device and in compiled code, may be. Their values are not read to find out. Copies with other strides have
other last bits: where there are documents, all are in the order of copies.

Decoding is the exception: a copy of the keys of a cache would cost ten times what the attention of one query does. So
where there are 16 keys or more to a query, and nothing is differentiated, keys and values are taken as they are.
`KVCache` stores zeros at padding, so behind it nothing changes; another cache has to hold finite numbers there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.masked import MaskedTensor

from locant.arguments import Real, real, scale_of, shape_error, shown
from locant.attention.mask import AttentionMask
from locant.errors import RangeError, ShapeError
from locant.kernels.transforms import hides_gradient, is_differentiated
from locant.positions import PositionEncoding, Positions
from locant.positions.base import bias_of
from locant.positions.documents import PADDING
from locant.positions.score_bias import ScoreBias
from locant.spelling import dtype_name
from locant.tensors import bounds, require_arithmetic, require_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that torch can multiply; float8 can only be stored."""
FEWEST_KEYS = 16
"""Keys per query from which a call counts as decoding. With fewer, the copy costs a fraction of the attention."""
DENSE = {
    "masked": "x.to_tensor(0.0), and Positions.from_mask(...) for what is hidden",
    "nested": "torch.nested.to_padded_tensor(x, 0.0), and Positions.from_mask(...) for the padding",
}
"""How tensors with a mask or lengths of their own are converted to dense ones."""


class Attended(NamedTuple):
    """What a backend computes."""

    y: Float[Tensor, "batch heads query value_dim"]
    """In the dtype of `q`."""
    lse: Float[Tensor, "batch heads query"] | None = None
    """The log-sum-exp of the scores of every query, in float32 at least; where `needs_lse` asks for it."""
    weights: Float[Tensor, "batch heads query key"] | None = None
    """Before dropout, in float32 at least; where `return_weights` asks for them."""


def joined(parts: Sequence[Attended], dim: int) -> Attended:
    """What was computed of other rows, or of other queries, as one."""
    if len(parts) == 1:
        return parts[0]
    y, *others = ([x for x in each if x is not None] for each in zip(*parts, strict=True))
    return Attended(torch.cat(y, dim), *(torch.cat(each, dim) if each else None for each in others))


@dataclass(frozen=True)
class AttentionInputs:
    """What a backend computes ``softmax(cap(q k^T scale) + bias) v`` from. Sinks are joined to what it gives back."""

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
    """Whether the log-sum-exp is wanted, by the caller or for sinks."""

    @property
    def scores(self) -> int:
        """The number of scores, over all rows and heads."""
        return self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[2]

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def bias(self) -> ScoreBias | None:
        """What the encoding adds to the scores; asked once."""
        if self.encoding is None:
            return None
        # Not `functools.cached_property`, whose lock the compiler cannot follow; a graph computes it once anyway.
        memo = {} if torch.compiler.is_compiling() else vars(self)
        if "asked" not in memo:
            memo["asked"] = bias_of(self.encoding, self.q, self.k, self.mask.queries, self.mask.keys)
        return memo["asked"]

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled scores between ``-softcap`` and ``softcap``, before a bias is added."""
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def tile(self, start: int, stop: int) -> AttentionInputs:
        """The queries ``start:stop``, and the keys that they attend to."""
        mask, keys = self.mask.tile(start, stop)
        q, k, v = self.q[:, :, start:stop], self.k[:, :, keys], self.v[:, :, keys]
        return dataclasses.replace(self, q=q, k=k, v=v, mask=mask)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """All tensors that the result depends on."""
        return self.q, self.k, self.v, *(() if self.bias is None else (x for x in self.bias.sources if x is not None))

    @property
    def needs_gradient(self) -> bool:
        """Whether ``backward`` may be called on the result."""
        return torch.is_grad_enabled() and any(x.requires_grad or hides_gradient(x) for x in self.sources)

    @property
    def is_transformed(self) -> bool:
        """Whether a derivative is wanted otherwise than by ``backward``: in forward mode, or by `torch.func`."""
        return is_differentiated(*self.sources)

    def without_padding(self) -> AttentionInputs:
        """With zeros for queries, keys and values at padding; in decoding, with keys and values as they are."""
        return self.in_order().cleared()

    def in_order(self, is_decoding: bool | None = None) -> AttentionInputs:
        """In the order in memory, where there are documents, that copies with zeros at padding have."""
        return self._where_documents(lambda _, x: x.contiguous(), is_decoding)

    def cleared(self, is_decoding: bool | None = None) -> AttentionInputs:
        """Zeros at padding, whatever the order in memory."""
        return self._where_documents(lambda positions, x: zero_padding(positions, x)[0], is_decoding)

    def _where_documents(self, change: Callable[..., Tensor], is_decoding: bool | None) -> AttentionInputs:
        q, k, v = self.q, self.k, self.v
        if self.mask.queries.document_or_none is not None:
            q = change(self.mask.queries, q)
        # Documents come first: to ask whether it is decoding makes a guard.
        if self.mask.keys.document_or_none is not None and not (
            self.is_decoding if is_decoding is None else is_decoding
        ):
            k, v = change(self.mask.keys, k), change(self.mask.keys, v)
        return dataclasses.replace(self, q=q, k=k, v=v)

    @property
    def is_decoding(self) -> bool:
        """Whether keys are read by few queries, and nothing is differentiated; `k` and `v` are then not copied.

        Decided by shapes and by what needs a gradient, so that compiled code reads no values.
        """
        if torch.compiler.is_exporting():
            return False  # an exported program is for every length
        few_queries = FEWEST_KEYS * self.q.shape[2] <= self.k.shape[2]
        return few_queries and not self.needs_gradient and not self.is_transformed


def zero_padding(
    positions: Positions, *tensors: Float[Tensor, "batch _ seq _"]
) -> tuple[Float[Tensor, "batch _ seq _"], ...]:
    """The tensors with zeros at padding, or themselves where there can be none.

    >>> where = Positions.of([0, 0, 1], document=[-1, 0, 0])
    >>> zero_padding(where, torch.full((1, 1, 3, 1), torch.nan))[0].flatten()
    tensor([0., nan, nan])
    """
    document = positions.document_or_none
    if document is None or bounds(document)[0] not in (None, PADDING):
        return tensors
    padding = (document == PADDING)[:, None, :, None]
    return tuple(_filled(x, padding) for x in tensors)


def _filled(x: Tensor, padding: Tensor) -> Tensor:
    """`x` with zeros at padding; torch cannot fill 8-bit dtypes, so their bytes are filled: a zero is all zero bits."""
    if x.dtype.itemsize > 1:
        return x.masked_fill(padding, 0.0)
    return x.view(torch.uint8).masked_fill(padding, 0).view(x.dtype)


def require_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise unless these are queries, keys and values that belong together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, x)
        if (kind := _unusual(x)) is not None:
            raise ShapeError(f"got {name} as a {kind} tensor, expected a dense one", DENSE.get(kind, "x.to_dense()"))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        got = f"got {shapes}, expected (batch, heads, seq, head_dim) each"
        raise ShapeError(got, "x.view(batch, seq, heads, -1).transpose(1, 2)")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        got = f"got {shapes}, expected one batch, one length for k and v, one head_dim for q and k"
        raise ShapeError(got, "keys and values of the same tokens")
    if q.shape[-1] == 0:
        raise ShapeError(f"got {shapes}, expected a head_dim of 1 or more", "head_dim = d_model // num_heads")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        got = f"got {q.shape[1]} query heads for {k.shape[1]} key heads, expected a multiple"
        raise ShapeError(got, "num_heads % num_kv_heads == 0")
    if q.dtype not in DTYPES or len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device, k.device, v.device}) > 1:
        dtypes = ", ".join(dtype_name(x.dtype) for x in (q, k, v))
        got = f"got q, k, v of {dtypes} on {q.device}, {k.device}, {v.device}"
        expected = "expected one dtype, floating-point of 16 bits or more, and one device"
        raise ShapeError(f"{got}, {expected}", "k.to(q), v.to(q)" if q.dtype in DTYPES else "q.bfloat16()")


def _unusual(x: Tensor) -> str | None:
    """The kind of a tensor that is not dense; ``None`` of one that is."""
    if isinstance(x, MaskedTensor):
        return "masked"
    if x.is_nested:
        return "nested"
    return None if x.layout == torch.strided else str(x.layout).removeprefix("torch.").lstrip("_")


def require_encoding(encoding: Any) -> None:
    """Raise unless it is an encoding, or none: a module that wraps one hides what it does to the scores."""
    if encoding is None or isinstance(encoding, PositionEncoding):
        return
    if isinstance(encoding, type):
        cause, remedy = f"the class {encoding.__name__}", f"{encoding.__name__}(num_heads)"
    elif isinstance(encoding, torch.nn.Module):
        cause, remedy = f"a module {type(encoding).__name__}", "the encoding itself; wrap or compile what calls attend"
    else:
        cause, remedy = shown(encoding), "locant.encoding(name, ...)"
    raise RangeError(f"got {cause} for encoding, expected a PositionEncoding or None", remedy)


def require_keys_between(encoding: PositionEncoding | None, mask: AttentionMask) -> None:
    """Raise where the bias depends on the keys between a key and its query, and some are known not to be there."""
    if encoding is not None and encoding.needs_all_keys and mask.skips_tokens:
        name = type(encoding).__name__
        got = f"got k_positions {mask.keys} for {mask.queries}, and {name} counts all keys from a key to its query"
        remedy = "all keys in one call, in place of parts for merge; or Positions.of(index, order=...) with an order"
        raise RangeError(got, f"{remedy} that counts the tokens there are")


def factor_of(scale: Any, head_dim: int) -> Real:
    """The factor on the scores."""
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise RangeError("got a scale that requires a gradient, which it would not get", "attend(q * scale, scale=1.0)")
    return scale_of(scale, float(head_dim) ** -0.5)


def softcap_of(softcap: Any) -> Real | None:
    """The bound of scores, if there is one."""
    if isinstance(softcap, Tensor) and softcap.requires_grad:
        raise RangeError("got a softcap that requires a gradient, which it would not get", "softcap.item()")
    return None if softcap is None else real("softcap", softcap, above=0, remedy="softcap=None for no bound")


def sinks_of(sinks: Any, q: Tensor) -> Float[Tensor, " heads"] | None:
    """One logit for each head of the queries, in float32 at least."""
    if sinks is None:
        return None
    require_arithmetic("sinks", sinks)
    if sinks.shape != q.shape[1:2]:
        raise shape_error("sinks", sinks, f"({q.shape[1]},)", "one logit for each query head")
    if sinks.device != q.device:
        raise ShapeError(f"got sinks on {sinks.device}, expected them where q is, on {q.device}", "sinks.to(q.device)")
    return sinks.to(torch.promote_types(q.dtype, torch.float32))
