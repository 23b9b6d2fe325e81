"""Rotary positions (RoPE): Su et al. 2021, https://arxiv.org/abs/2104.09864."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.arguments import MAX_INT32, Real, flag, one_of, short_repr, whole
from locant.deprecation import Renamed
from locant.errors import LocantError, RangeError, Remedy, ShapeError
from locant.kernels.norm_rotary import (
    HeadNorm,
    can_write_into,
    norm_and_rotate,
    norm_and_rotate_into,
    require_norm,
)
from locant.kernels.rotary import Layout, Tables, is_transformed, require_writable, rotate, rotate_pairs
from locant.kernels.rotary.reference import cos_sin
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import (
    EncodingInfo,
    Keys,
    PositionEncoding,
    Queries,
    RotationIntoMemory,
    require_heads,
    resolve_positions,
)
from locant.positions.constant import Constant
from locant.positions.fractional_angles import FractionalAngles
from locant.positions.frequencies import check_base, check_width
from locant.positions.pair_table import Channels, Pairs, check_sections
from locant.positions.positions import OptionalPositions, Positions, positions_or_length
from locant.positions.scaling import TRAINED, Scaling, Unscaled, scaling_by_name
from locant.positions.temperature import Temperature
from locant.spelling import literal
from locant.tensors import as_dtype, has_float64, has_values

LEGACY_KEYS = ("inv_freq", "original_inv_freq", "freqs", "cos_cached", "sin_cached")
"""Keys that other implementations save in checkpoints. Their values follow from the configuration."""

Rotated = Float[Tensor, "batch *heads seq head_dim"]
RotatedKeys = Float[Tensor, "batch *kv_heads key head_dim"]


class Rotary(PositionEncoding):
    r"""Rotates each pair of dimensions of q and k by position x frequency, so that q . k depends on distance only.

    .. math:: \begin{pmatrix} x_a' \\ x_b' \end{pmatrix} =
        \begin{pmatrix} \cos p\theta_i & -\sin p\theta_i \\ \sin p\theta_i & \cos p\theta_i \end{pmatrix}
        \begin{pmatrix} x_a \\ x_b \end{pmatrix}, \qquad \theta_i = \text{base}^{-2i/d}

    (a, b) are the dimensions of pair i, and p is the position. This encoding has no parameters, no buffers and no
    maximum length. ``.half()``, autocast, ``to_empty`` and FSDP do not affect it.

    Args:
        head_dim: dimensions per head.
        base: the frequencies fall from 1 towards 1 / base (the theta of most configurations).
        scaling: a scaling of `locant.scaling`, for contexts longer than the trained length. Or a name and a factor:
            ``"yarn:8"`` for a trained length of 4,096, ``"yarn:8:8192"`` for 8,192.
        layout: the dimensions that form a pair: ``"half"`` (Llama, NeoX: i with i + d/2) or ``"interleaved"`` (the
            paper, GPT-J: 2i with 2i + 1).
        rotary_dim: the number of rotated dimensions, from the first. The rest does not change (GPT-J, NeoX, Phi).
        angles: ``"exact"``, or ``"float32"`` for the rounding that a model was trained with (in eager code).
        sections: the number of pairs of each position axis, for images and video. As in Qwen2-VL, ``(16, 24, 24)``
            rotates the first 16 pairs by the first axis, and so on. Text has the same index on every axis, or positions
            of one axis.
        axial: whether the frequencies of each section start again from 1 (vision encoders), or all sections share one
            series over the whole head (M-RoPE).
        seq_len: the length of the whole sequence, for a scaling that depends on it: see `for_length`.
        temperature: a factor that multiplies the queries after the rotation (Ministral 3, Mistral 4).
        pairs: any table of pairs, instead of the shorthands `layout`, `rotary_dim`, `sections` and `axial`.

    Limits:
        Models fail beyond the length they were trained on, unless the frequencies are scaled. Weights trained with one
        `layout` are wrong with the other, and the only sign is worse output.

    Tested against:
        `transformers`' Llama, GPT-J, GPT-NeoX, Phi and Qwen2-VL. In float32 mode, the rotary modules of published
        configurations, bit for bit (DeepSeek-V2 and Llama 4 up to rounding). Also 50-digit arithmetic (mpmath) up to
        position 2^31 - 1.

    >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
    >>> [rotated.shape for rotated in Rotary(64).rotate(q, k)]
    [torch.Size([2, 8, 5, 64]), torch.Size([2, 2, 5, 64])]
    """

    info = EncodingInfo(
        name="rotary",
        aliases=("rope", "rotary_embedding", "rotary_position_embedding"),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, 3 head_dim operations per head of q and k",
        cost_of_pairs="nothing",
        extrapolation="poor beyond the trained length without a scaling of its frequencies",
        used_by="Llama, Mistral, Qwen, Gemma, DeepSeek, GPT-NeoX, GPT-J, Phi",
        paper="Su 2021, arXiv 2104.09864",
    )

    layer_types: tuple[str, ...] | None = None
    """The layer types with different encodings in the configured model, or ``None`` if unknown."""

    def __init__(
        self,
        head_dim: int,
        *,
        base: Real = 10_000.0,
        scaling: Scaling | str | None = None,
        layout: Layout = "half",
        rotary_dim: int | None = None,
        angles: AngleMode = "exact",
        sections: Sequence[int] | None = None,
        axial: bool = False,
        seq_len: int | None = None,
        pairs: Pairs | None = None,
        temperature: Temperature | None = None,
    ) -> None:
        super().__init__()
        if pairs is not None:
            _require_no_shorthand(pairs, layout=layout, rotary_dim=rotary_dim, sections=sections, axial=axial)
            rotary_dim, layout = 2 * len(pairs), pairs.layout or "half"
        remedy = Remedy("{}, or add an even rotary_dim", head_dim=64)
        self.head_dim = check_width("head_dim", head_dim, even=rotary_dim is None, remedy=remedy)
        if pairs is not None and (last := max(map(max, pairs.dims))) >= self.head_dim:
            got = f"got pairs with dimension {last} for head_dim={self.head_dim}"
            raise RangeError(got, f"use dimensions from 0 to {self.head_dim - 1}")
        rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        remedy = f"use an even number from 2 to head_dim={self.head_dim}"
        self.rotary_dim = whole("rotary_dim", rotary_dim, 2, self.head_dim, even=True, remedy=remedy)
        self.base = check_base(base)
        if isinstance(scaling, str):
            text, scaling = scaling, scaling_by_name(scaling, TRAINED, self.rotary_dim, self.base)
            if not text.partition(":")[2]:
                remedy = f"'{text.rstrip(':')}:4', for four times the trained length"
                raise RangeError(f"got {text!r} for scaling, expected a factor after the name", remedy)
        if scaling is not None and not isinstance(scaling, Scaling):
            got = f"got {short_repr(scaling)} for scaling, expected a scaling of locant.scaling"
            remedy = "Rotary.from_config(config), with the whole configuration" if isinstance(scaling, dict) else ""
            raise RangeError(got, remedy or "'linear:4', or Linear(factor=4.0)")
        self.scaling = Unscaled() if scaling is None else scaling
        self.layout: Layout = layout
        self.sections = None if sections is None else check_sections(sections, self.rotary_dim // 2)
        self.axial = flag("axial", axial)
        self._custom_pairs = pairs
        self.pairs = pairs or Pairs.of(self.rotary_dim, layout=layout, sections=self.sections, axial=self.axial)
        self.num_axes = self.pairs.num_axes or 1
        self._axis_of_pair = Constant(torch.tensor(self.pairs.axes, dtype=torch.int64, device="cpu"))
        remedy = "pass the length of the whole sequence, cache included"
        self.seq_len = None if seq_len is None else whole("seq_len", seq_len, 1, MAX_INT32 + 1, remedy=remedy)
        frequencies, rounded = self.pairs.frequencies(self.scaling, self.base, self.seq_len)
        factor = self.scaling.effective_attention_factor
        self.angles = Angles(frequencies, angles, rounded=rounded, attention_factor=factor)
        self._fractional_angles = FractionalAngles(self.angles, rounded)
        if temperature is not None and not isinstance(temperature, Temperature):
            got = f"got {short_repr(temperature)} for temperature, expected a Temperature"
            raise RangeError(got, "locant.positions.Temperature(step=8192)")
        self.temperature = temperature
        self._reordered: tuple[Channels, Rotary] | None = None
        if self.pairs.runs_as is None:
            channels = Channels(self.pairs, self.head_dim)
            dims = Pairs.of(self.rotary_dim, layout=channels.layout).dims
            ordered = self.replace(pairs=replace(self.pairs, dims=dims, num_heads=None), temperature=None)
            self._reordered = channels, ordered

    @classmethod
    def from_config(
        cls,
        config_or_dict: object,
        *,
        layer_type: str | None = None,
        angles: AngleMode = "exact",
        layout: Layout | None = None,
    ) -> Rotary:
        """Return the encoding of a Hugging Face configuration, an object or its dictionary. See `locant.models`.

        Args:
            layer_type: the type of layers. It is required if they differ (Gemma 3).
            layout: the layout, for architectures that locant does not know, because configurations do not state it.
                Without it, locant measures the installed `transformers`' model of this architecture, with a warning.

        >>> config = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "rope_theta": 1e6}
        >>> Rotary.from_config(config)
        Rotary(head_dim=128, base=1000000, layout='half', angles='exact')
        """
        from locant.models.encodings import layer_types, rotary_from_config
        from locant.models.registry import read_known_config

        rotary = rotary_from_config(cls, config_or_dict, layer_type=layer_type, angles=angles, layout=layout)
        with contextlib.suppress(LocantError):  # the architecture has no row, or the configuration no model_type
            read_known_config(config_or_dict)
            rotary.layer_types = layer_types(config_or_dict)
        return rotary

    def to_config(self, *, max_seq_len: int | None = None, form: str = "rope_parameters") -> dict[str, Any]:
        """Return the keys of a configuration with which `transformers` and vLLM apply this rotation.

        Args:
            max_seq_len: the longest sequence, if the scaling does not imply it.
            form: ``"rope_parameters"``, or ``"rope_scaling"`` for earlier releases of both programs.
        """
        from locant.models.rotary_to_config import rotary_to_config, warn_if_servers_differ

        warn_if_servers_differ(self)
        return rotary_to_config(self, max_seq_len=max_seq_len, form=form)

    def for_length(self, seq_len: int) -> Rotary:
        """Return this encoding for sequences of `seq_len` tokens in total, including generated ones.

        Only scalings that depend on the length (`DynamicNTK`, `LongRoPE`) need it, and only past their trained length.
        The frequencies of the copy are fixed, so keys that were cached with it remain valid. `rerotate` converts them
        to another length.

        >>> from locant.positions.scaling import DynamicNTK
        >>> rotary = Rotary(64, scaling=DynamicNTK(factor=4.0, original_max_seq_len=2048)).for_length(8192)
        """
        return self.replace(seq_len=seq_len)

    @property
    def has_named_layout(self) -> bool:
        """Return whether the table of pairs comes from ``layout``, ``rotary_dim``, ``sections`` and ``axial``."""
        return self._custom_pairs is None

    def replace(self, **options: Any) -> Rotary:
        """Return this encoding with other options of the constructor.

        >>> Rotary(64, layout="interleaved").replace(angles="float32")
        Rotary(head_dim=64, base=10000, layout='interleaved', angles='float32')
        """
        table = ("layout", "rotary_dim", "sections", "axial") if self.has_named_layout else ("pairs",)
        names = ("base", "scaling", "seq_len", "temperature", *table)
        same: dict[str, Any] = {name: getattr(self, name) for name in names} | {"angles": self.angles.mode}
        rotary = Rotary(self.head_dim, **same | options)
        rotary.layer_types = self.layer_types
        return rotary

    alike = Renamed("replace")

    def rerotate(
        self, k: Float[Tensor, "batch kv_heads key head_dim"], positions: Positions, from_len: int, to_len: int
    ) -> Float[Tensor, "batch kv_heads key head_dim"]:
        """Change the rotation of keys from ``for_length(from_len)`` to ``for_length(to_len)``, and return them.

        This method rotates the keys once more, by the difference of the two angles, so a cache can grow without the
        original keys. Values do not change. The result is exact except for one more rounding to the dtype of `k`.
        """
        require_heads("k", k, positions, self.head_dim)
        before, after = (self.for_length(length)._cos_sin_float64(positions) for length in (from_len, to_len))
        return self._move(k, before, after)

    def move(
        self, k: Float[Tensor, "batch kv_heads key head_dim"], positions: Positions, to: Positions
    ) -> Float[Tensor, "batch kv_heads key head_dim"]:
        """Move rotated keys from `positions` to `to`, and return them.

        Use this method when the positions of cached keys change: a middle part was dropped and later tokens move up
        (StreamingLLM), or a separately cached document is appended to others. At any distance, the result is as exact
        as the result of `rerotate`.

        >>> k, old, new = torch.randn(1, 2, 3, 8), Positions.arange(3), Positions.after(1_000_000, 3)
        >>> rotary = Rotary(8)
        >>> moved = rotary.move(rotary.rotate_one(k, old), old, new)
        >>> torch.allclose(moved, rotary.rotate_one(k, new), atol=1e-6)
        True
        """
        require_heads("k", k, positions, self.head_dim)
        require_heads("k", k, to, self.head_dim)
        return self._move(k, self._cos_sin_float64(positions), self._cos_sin_float64(to))

    def _cos_sin_float64(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return `cos_sin` in float64, on the CPU if the device has no float64."""
        return self.cos_sin(positions if has_float64(positions.device) else positions.to("cpu"), torch.float64)

    def _move(self, k: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
        """Replace the rotation of keys. `before` and `after` are the cosines and sines of the old and new rotation."""
        (cos_before, sin_before), (cos_after, sin_after) = before, after
        size = self.scaling.effective_attention_factor**2  # to divide by e^(ia) m is to multiply by e^(-ia) / m
        cos = (cos_after * cos_before + sin_after * sin_before) / size
        sin = (sin_after * cos_before - cos_after * sin_before) / size
        dtype = torch.promote_types(k.dtype, torch.float32)
        cos, sin = cos.to(dtype).to(k.device), sin.to(dtype).to(k.device)
        if self._reordered is None:
            return rotate_pairs(k, cos, sin, self.layout)
        channels, _ = self._reordered
        return channels.scatter(rotate_pairs(channels.gather(k), cos, sin, channels.layout), k)

    def cos_sin(
        self, positions: Positions | int, dtype: torch.dtype | str = torch.float32
    ) -> tuple[Float[Tensor, "batch seq pairs"], Float[Tensor, "batch seq pairs"]]:
        """Return the cosine and sine of each pair of each token, times the attention factor.

        If `positions` is a number n, use the positions 0 to n - 1.
        """
        positions = positions_or_length(positions)
        index, tables = self._index_and_tables(positions)
        return cos_sin(index, tables, as_dtype(dtype) if isinstance(dtype, str) else dtype)

    @property
    def inv_freq(self) -> Float[Tensor, " pairs"]:
        """The inverse frequencies after scaling, in radians per position, in float64 on the CPU.

        >>> Rotary(8).inv_freq.tolist()
        [1.0, 0.1, 0.01, 0.001]
        """
        return self.angles.inv_freq

    @property
    def inv_freq_float32(self) -> Float[Tensor, " pairs"]:
        """The inverse frequencies as `transformers` computes them, in float32 on the CPU.

        Pass these to other programs that start from an ``inv_freq``. They differ from `inv_freq` in their last bits.
        """
        return self.pairs.frequencies(self.scaling, self.base, self.seq_len)[1]

    def cos_sin_cache(self, n: int, dtype: torch.dtype | str = torch.float32) -> Float[Tensor, "n rotary_dim"]:
        """Return the cosines of the positions 0 to n - 1 next to their sines, as in the tables of serving engines.

        vLLM (``cos_sin_cache`` of its rotary classes), SGLang and FlashInfer read this form, whichever dimensions they
        pair. With ``angles="float32"`` it has the same bits as their tables, except for a rounding of `DynamicNTK`'s
        base. For any `angles`, a cosine is off by up to 0.002 in bfloat16 and by up to 0.00024 in float16. For a
        scaling that depends on the length, see `for_length`. vLLM's cache for `LongRoPE` holds two tables, first the
        table of the trained length.

        Args:
            n: the number of positions. The table holds n * rotary_dim numbers.

        >>> Rotary(4).cos_sin_cache(2)
        tensor([[1.0000, 1.0000, 0.0000, 0.0000],
                [0.5403, 0.9999, 0.8415, 0.0100]])
        """
        dtype = as_dtype(dtype)
        cos, sin = self.cos_sin(Positions.arange(n), torch.promote_types(dtype, torch.float32))
        return torch.cat([cos[0], sin[0]], dim=-1).to(dtype)

    def tables(self, n: int, like: Literal["numpy", "torch"] = "numpy") -> tuple[Any, Any]:
        """Return the cosines and the sines of the positions 0 to n - 1, each float32 ``[n, pairs]``.

        JAX, MLX and ONNX accept them as NumPy arrays.

        >>> cos, sin = Rotary(4).tables(3)
        >>> type(cos).__name__, cos.shape, cos.dtype
        ('ndarray', (3, 2), dtype('float32'))
        """
        one_of("like", like, ("numpy", "torch"), "like='numpy'")
        tables = (table[0] for table in self.cos_sin(Positions.arange(n)))
        cos, sin = ((table.numpy() if like == "numpy" else table) for table in tables)
        return cos, sin

    def rotate_one(self, x: Rotated, positions: OptionalPositions = None) -> Rotated:
        """Rotate one tensor, queries or keys, as `rotate` does, but without a temperature of queries.

        >>> Rotary(2).rotate_one(torch.tensor([[[[1.0, 0.0]]]]), Positions.after(1, 1))
        tensor([[[[0.5403, 0.8415]]]])
        """
        if _has_no_heads(x):
            return self.rotate_one(x[:, None], positions)[:, 0]
        positions = require_heads("x", x, positions, self.head_dim, self.num_axes)
        if self._reordered is not None:
            channels, ordered = self._reordered
            return channels.scatter(ordered.rotate_one(channels.gather(x), positions), x)
        return rotate(x, None, *self._index_and_tables(positions), self.layout)[0]

    def rotate(
        self,
        q: Rotated,
        k: RotatedKeys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
        norm: HeadNorm | None = None,
    ) -> tuple[Rotated, RotatedKeys]:
        """Rotate queries and keys in their own dtype, with arithmetic in float32 or wider.

        Tensors without heads have the shape ``batch seq head_dim``.

        With `inplace`, `q` and `k` may be the same memory, which is rotated once. If they overlap in part, or if torch
        cannot overwrite them, raise an error before writing anything. If a gradient is needed, a norm keeps copies.

        With `norm`, apply this norm before the rotation, as Qwen3, Gemma 3 and Olmo 2 do. On a CPU this is one pass
        over memory. In float32 with ``angles="float32"``, the results have the bits of `transformers`' layers.

        >>> q, k = torch.full((1, 8, 5, 64), 3.0), torch.full((1, 2, 5, 64), 3.0)
        >>> q, k = Rotary(64).rotate(q, k, norm=HeadNorm(torch.ones(64), torch.ones(64)))
        >>> q[0, 0, 0, :4], k[0, 0, 0, :4]
        (tensor([1.0000, 1.0000, 1.0000, 1.0000]), tensor([1.0000, 1.0000, 1.0000, 1.0000]))
        """
        if _has_no_heads(q) and _has_no_heads(k):
            q, k = self.rotate(q[:, None], k[:, None], positions, k_positions, inplace=inplace, norm=norm)
            return q[:, 0], k[:, 0]
        for name, x in (("q", q), ("k", k)):
            if x is None:
                raise ShapeError(f"got None for {name}, expected a tensor", "encoding.rotate_one(x, positions)")
        if positions is None:
            positions, _ = resolve_positions(self, q, k, positions, k_positions)
        keys = positions if k_positions is None else k_positions
        if self.temperature is None:
            return self._rotate(q, k, positions, keys, inplace, norm)
        if inplace and isinstance(q, Tensor) and isinstance(k, Tensor) and require_writable(q, k):
            raise ShapeError("got one tensor as q and k, but only queries have a temperature", "k.clone()")
        rotated_q, rotated_k = self._rotate(q, k, positions, keys, inplace, norm)
        return self.temperature.scale(rotated_q, positions, inplace=inplace), rotated_k

    def _rotate(
        self, q: Tensor, k: Tensor, positions: Positions, keys: Positions, inplace: bool, norm: HeadNorm | None
    ) -> tuple[Tensor, Tensor]:
        require_heads("q", q, positions, self.head_dim)
        require_heads("k", k, keys, self.head_dim)
        require_norm(norm)
        if self._reordered is not None:
            channels, ordered = self._reordered
            if inplace and require_writable(q, k) and norm is not None:
                raise ShapeError("got one tensor as q and k to norm and rotate in place", "k.clone()")
            normed_q, normed_k = (q, k) if norm is None else norm.apply(q, k)
            rotated_q, rotated_k = ordered.rotate(channels.gather(normed_q), channels.gather(normed_k), positions, keys)
            rotated_q, rotated_k = channels.scatter(rotated_q, normed_q), channels.scatter(rotated_k, normed_k)
            return (q.copy_(rotated_q), k.copy_(rotated_k)) if inplace else (rotated_q, rotated_k)
        if keys is not positions or k.dtype != q.dtype:
            return self._rotate_each(q, k, positions, keys, inplace, norm)
        index, tables = self._index_and_tables(positions)
        if norm is not None:
            return norm_and_rotate(q, k, index, tables, self.layout, norm, inplace=inplace)
        return rotate(q, k, index, tables, self.layout, inplace=inplace)

    def norm_and_rotate(
        self, q: Queries, k: Keys, positions: Positions, norm: HeadNorm | None
    ) -> tuple[Rotated, RotatedKeys]:
        return self.rotate(q, k, positions, norm=norm)

    def rotation_into_memory(
        self, q: Queries, k: Keys, positions: Positions, norm: HeadNorm | None = None, *, inplace: bool = False
    ) -> RotationIntoMemory | None:
        if self._reordered is not None or not can_write_into(q, k):
            return None
        require_heads("q", q, positions, self.head_dim)
        require_heads("k", k, positions, self.head_dim)
        require_norm(norm)
        if norm is not None:
            norm.require_fits(q, k)
        if self.temperature is not None:
            positions.require_single_axis("Temperature")
        if inplace and require_writable(q, k):
            raise ShapeError("got one tensor as q and k, but only q may be overwritten", "k.clone()")
        index, tables = self._index_and_tables(positions)

        def rotate_and_write(out_k: Tensor, v: Tensor, out_v: Tensor) -> Tensor:
            out_q = q if inplace else torch.empty_like(q)
            norm_and_rotate_into(q, k, v, out_q, out_k, out_v, index, tables, self.layout, norm)
            return out_q if self.temperature is None else self.temperature.scale(out_q, positions, inplace=True)

        return rotate_and_write

    def unrotate(self, y: Rotated, positions: OptionalPositions = None) -> Rotated:
        """Undo `rotate_one`: rotate by the negative angles, and divide by the attention factor.

        >>> y, positions = torch.randn(1, 2, 5, 8), Positions.arange(5)
        >>> torch.allclose(Rotary(8).unrotate(Rotary(8).rotate_one(y, positions), positions), y, atol=1e-6)
        True
        """
        if _has_no_heads(y):
            return self.unrotate(y[:, None], positions)[:, 0]
        positions = require_heads("y", y, positions, self.head_dim, self.num_axes)
        if self._reordered is not None:
            channels, ordered = self._reordered
            return channels.scatter(ordered.unrotate(channels.gather(y), positions), y)
        index, tables = self._index_and_tables(positions)
        tables = tables._replace(attention_factor=1 / tables.attention_factor)
        return rotate(y, None, index, tables, self.layout, inverse=True)[0]

    def _rotate_each(
        self, q: Tensor, k: Tensor, positions: Positions, keys: Positions, inplace: bool, norm: HeadNorm | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate q and k separately, if they differ in positions or dtype. Raise all errors before the first write."""
        if len(q) != len(k):
            got = f"got q for {len(q)} rows and k for {len(k)}, expected one batch"
            raise ShapeError(got, "pass q and k of one batch, such as k.expand(len(q), -1, -1, -1)")
        q_tables, k_tables = self._index_and_tables(positions), self._index_and_tables(keys)
        if norm is not None:
            norm.require_fits(q, k)
        same = inplace and require_writable(q, k)
        if inplace and (is_transformed() or not has_values(q)):  # overlaps are unknown then
            rotated_q, rotated_k = self._rotate_each(q, k, positions, keys, False, norm)
            return q.copy_(rotated_q), k.copy_(rotated_k)
        if norm is not None:
            if same:
                raise ShapeError("got one tensor as q and k to norm and rotate in place", "k.clone()")
            rotated_q, _ = norm_and_rotate(q, None, *q_tables, self.layout, norm, inplace=inplace)
            return rotated_q, norm_and_rotate(k, None, *k_tables, self.layout, norm.for_keys(), inplace=inplace)[0]
        if same:
            if positions != keys:
                raise ShapeError("got one tensor as q and k to rotate in place at different positions", "k.clone()")
            return rotate(q, k, *q_tables, self.layout, inplace=True)
        rotated_q, _ = rotate(q, None, *q_tables, self.layout, inplace=inplace)
        return rotated_q, rotate(k, None, *k_tables, self.layout, inplace=inplace)[0]

    def _index_and_tables(self, positions: Positions) -> tuple[Int[Tensor, "batch seq *axes"], Tables]:
        """Return the index and the tables that kernels need for these positions."""
        longest, parts = self.scaling.length_threshold, positions.denominator
        if longest is not None:
            limit = max(self.seq_len or 0, longest)
            name = f"{type(self.scaling).__name__} for {limit} tokens"
            remedy = "rotary.for_length(seq_len) with the length of the whole sequence"
            positions.require_within(-MAX_INT32, limit * parts - 1, name, remedy)
        if self.pairs.num_axes == 1 or positions.axes == 1:
            if positions.axes != 1:  # one axis may have a denominator
                positions.require_single_axis("Rotary without sections")
            index, axis_of_pair = positions.index, None
            index = index if index.ndim == 2 else index.flatten(1)
        elif self.pairs.num_axes == positions.axes:
            index, axis_of_pair = positions.index, self._axis_of_pair.on(positions.device)
        else:
            expected = f"{self.pairs.num_axes} sections" if self.sections else f"pairs of {self.pairs.num_axes} axes"
            got = f"got positions with {positions.axes} axes for {expected}"
            raise ShapeError(got, "use Rotary(sections=...) with one section per axis")
        angles = self.angles if parts == 1 else self._fractional_angles.get(parts)
        return index, angles.tables(positions.device, positions.max_index, positions.min_index, axis_of_pair)

    def _example_call(self, method: str) -> str:
        return super()._example_call(method) + ", or encoding.rotate_one(x, positions) for one tensor"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in LEGACY_KEYS:
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        partial = f", rotary_dim={self.rotary_dim}" if self.rotary_dim != self.head_dim else ""
        partial += "" if self.has_named_layout else f", pairs={self.pairs}"
        scaling = "" if isinstance(self.scaling, Unscaled) else f", scaling={self.scaling}"
        sections = "" if self.sections is None else f", sections={self.sections}, axial={self.axial}"
        length = "" if self.seq_len is None else f", seq_len={self.seq_len}"
        length += "" if self.temperature is None else f", temperature={self.temperature}"
        shape = f"head_dim={self.head_dim}, base={literal(self.base)}{partial}{scaling}{sections}{length}"
        return f"{shape}, layout={self.layout!r}, angles={self.angles.mode!r}"


def _has_no_heads(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3


def _require_no_shorthand(pairs: Any, **short: Any) -> None:
    if not isinstance(pairs, Pairs):
        raise RangeError(
            f"got {short_repr(pairs)} for pairs, expected a Pairs table", "locant.positions.Pairs(dims=...)"
        )
    plain = {"layout": "half", "rotary_dim": None, "sections": None, "axial": False}
    shorthand = [name for name, value in short.items() if np.ndim(value) or value != plain[name]]
    if shorthand:
        got = f"got pairs together with {' and '.join(shorthand)}, expected pairs alone"
        raise RangeError(got, f"use pairs without {shorthand[0]}")
