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

from locant.arguments import MAX_INT32, flag, one_of, shown, whole
from locant.errors import LocantError, RangeError, Remedy, ShapeError
from locant.kernels.rotary import Layout, Tables, is_transformed, require_writable, rotate, rotate_pairs
from locant.kernels.rotary.reference import cos_sin
from locant.positions.angles import AngleMode, Angles
from locant.positions.base import EncodingInfo, Keys, PositionEncoding, Queries, require_heads, standing
from locant.positions.constant import Constant
from locant.positions.frequencies import PRECISION, check_base, check_width
from locant.positions.pair_table import Channels, Pairs, check_sections
from locant.positions.positions import Positions, Where, positions_or_length
from locant.positions.scaling import TRAINED, Scaling, Unscaled, scaling_by_name
from locant.positions.temperature import Temperature
from locant.tensors import has_float64, has_values

LEGACY_KEYS = ("inv_freq", "original_inv_freq", "freqs", "cos_cached", "sin_cached")
"""What other implementations keep in checkpoints; all of it follows from the configuration."""

MOST_DENOMINATORS = 32
"""Tables of angles that are kept for positions in parts, some MiB each: images of as many shapes in turns."""


Rotated = Float[Tensor, "batch *heads seq head_dim"]
RotatedKeys = Float[Tensor, "batch *kv_heads key head_dim"]


class RotatedAlike(PositionEncoding):
    """The base of encodings that rotate keys as they rotate queries, each by itself: a subclass writes `_rotated`."""

    def rotate_one(self, x: Queries, positions: Where = None) -> Queries:
        """One tensor, queries or keys."""
        return self._rotated("x", x, positions)

    def rotate(
        self, q: Queries, k: Keys, positions: Where = None, k_positions: Where = None, *, inplace: bool = False
    ) -> tuple[Queries, Keys]:
        """Both, in the dtype they came in; the arithmetic is float32 at least."""
        positions, keys = standing(self, q, k, positions, k_positions)
        rotated = self._rotated("q", q, positions), self._rotated("k", k, keys)
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated

    def _rotated(self, name: str, x: Tensor, positions: Where) -> Tensor:
        """One tensor; `name` is what errors call it."""
        raise NotImplementedError


class Rotary(PositionEncoding):
    r"""Rotates each pair of dimensions of q and k by position x frequency, so that q . k depends on distance only.

    .. math:: \begin{pmatrix} x_a' \\ x_b' \end{pmatrix} =
        \begin{pmatrix} \cos p\theta_i & -\sin p\theta_i \\ \sin p\theta_i & \cos p\theta_i \end{pmatrix}
        \begin{pmatrix} x_a \\ x_b \end{pmatrix}, \qquad \theta_i = \text{base}^{-2i/d}

    (a, b) are the dimensions of pair i, and p is the position. No parameters, no buffers, no maximal length; and
    ``.half()``, autocast, ``to_empty`` and FSDP change nothing here.

    Args:
        head_dim: dimensions per head.
        base: the frequencies fall from 1 towards 1 / base (the theta of most configurations).
        scaling: how frequencies are stretched for contexts longer than the trained one, see `locant.scaling`; or a name
            and a factor, ``"yarn:8"``, from a trained length of 4 096, or ``"yarn:8:8192"`` from another.
        layout: which dimensions form a pair: ``"half"`` (Llama, NeoX: i with i + d/2) or ``"interleaved"`` (the paper,
            GPT-J: 2i with 2i + 1).
        rotary_dim: rotate only the first dimensions of a head, and leave the rest as it is (GPT-J, NeoX, Phi).
        angles: ``"exact"``, or ``"float32"`` for the rounding that a model was trained with (in eager code).
        sections: pairs per position axis for images and video, as in Qwen2-VL: ``(16, 24, 24)`` gives the first 16
            pairs the first axis, and so on. Text has the same index on every axis, or positions of one axis.
        axial: whether each section has a ladder of frequencies of its own, from 1 down (vision encoders), or all
            sections share the one over the whole head (M-RoPE).
        seq_len: the length of the whole sequence, for a scaling that depends on it: see `for_length`.
        temperature: of the queries, which it multiplies after they are rotated (Ministral 3, Mistral 4).
        pairs: any other table of pairs, in the place of `layout`, `rotary_dim`, `sections` and `axial`, which are short
            ways to write one.

    Limits:
        Models fail beyond the length they were trained on, unless the frequencies are scaled. Weights trained with one
        `layout` are wrong with the other, and nothing says so but worse output.

    Tested against:
        `transformers`' Llama, GPT-J, GPT-NeoX, Phi and Qwen2-VL; in float32 mode the rotary modules of published
        configurations, bit for bit (DeepSeek-V2's and Llama 4's up to rounding); and 50-digit arithmetic (mpmath)
        up to position 2^31 - 1.

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
    """Of the model that it was read from, the kinds of layers whose encodings differ; ``None``: not known."""

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
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
            _require_alone(pairs, layout=layout, rotary_dim=rotary_dim, sections=sections, axial=axial)
            rotary_dim, layout = 2 * len(pairs), pairs.layout or "half"
        remedy = Remedy("{}, or an even rotary_dim beside it", head_dim=64)
        self.head_dim = check_width("head_dim", head_dim, even=rotary_dim is None, remedy=remedy)
        if pairs is not None and (last := max(map(max, pairs.dims))) >= self.head_dim:
            got = f"got pairs with dimension {last} for head_dim={self.head_dim}"
            raise RangeError(got, f"dimensions from 0 to {self.head_dim - 1}")
        rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        remedy = f"an even number from 2 to head_dim={self.head_dim}"
        self.rotary_dim = whole("rotary_dim", rotary_dim, 2, self.head_dim, even=True, remedy=remedy)
        self.base = check_base(base)
        if isinstance(scaling, str):
            text, scaling = scaling, scaling_by_name(scaling, TRAINED, self.rotary_dim, self.base)
            if not text.partition(":")[2]:
                remedy = f"'{text.rstrip(':')}:4', for four times the trained length"
                raise RangeError(f"got {text!r} for scaling, expected a factor behind the name", remedy)
        if scaling is not None and not isinstance(scaling, Scaling):
            got = f"got {shown(scaling)} for scaling, expected one of locant.scaling"
            remedy = "Rotary.from_config(config), of the whole configuration" if isinstance(scaling, dict) else ""
            raise RangeError(got, remedy or "'linear:4', or Linear(factor=4.0)")
        self.scaling = Unscaled() if scaling is None else scaling
        self.layout: Layout = layout
        self.sections = None if sections is None else check_sections(sections, self.rotary_dim // 2)
        self.axial = flag("axial", axial)
        self._own_pairs = pairs
        self.pairs = pairs or Pairs.of(self.rotary_dim, layout=layout, sections=self.sections, axial=self.axial)
        self.num_axes = self.pairs.num_axes or 1
        self._axis_of_pair = Constant(torch.tensor(self.pairs.axes, dtype=torch.int64, device="cpu"))
        remedy = "the length of the whole sequence, cache included"
        self.seq_len = None if seq_len is None else whole("seq_len", seq_len, 1, MAX_INT32 + 1, remedy=remedy)
        frequencies, rounded = self.pairs.frequencies(self.scaling, self.base, self.seq_len)
        factor = self.scaling.effective_attention_factor
        self.angles = Angles(frequencies, angles, rounded=rounded, attention_factor=factor)
        self._angles_over: dict[int, Angles] = {1: self.angles}
        if temperature is not None and not isinstance(temperature, Temperature):
            got = f"got {shown(temperature)} for temperature, expected that of queries"
            raise RangeError(got, "locant.positions.Temperature(step=8192)")
        self.temperature = temperature
        self._in_order: tuple[Channels, Rotary] | None = None
        if self.pairs.runs_as is None:
            channels = Channels(self.pairs, self.head_dim)
            dims = Pairs.of(self.rotary_dim, layout=channels.layout).dims
            ordered = self.alike(pairs=replace(self.pairs, dims=dims, num_heads=None), temperature=None)
            self._in_order = channels, ordered

    @classmethod
    def from_config(
        cls,
        config_or_dict: object,
        *,
        layer_type: str | None = None,
        angles: AngleMode = "exact",
        layout: Layout | None = None,
    ) -> Rotary:
        """The encoding that a Hugging Face configuration describes, an object or its dictionary; see `locant.models`.

        Args:
            layer_type: which layers, where they differ (Gemma 3); required then.
            layout: needed where the architecture is not known, since configurations do not state it; without it, an
                installed `transformers` that knows the architecture is measured, and a warning says so.

        >>> config = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "rope_theta": 1e6}
        >>> Rotary.from_config(config)
        Rotary(head_dim=128, base=1e+06, layout='half', angles='exact')
        """
        from locant.models.encodings import layer_types, rotary_from_config
        from locant.models.registry import read_known

        rotary = rotary_from_config(cls, config_or_dict, layer_type=layer_type, angles=angles, layout=layout)
        with contextlib.suppress(LocantError):  # no row for the architecture, or no key that says it
            read_known(config_or_dict)
            rotary.layer_types = layer_types(config_or_dict)
        return rotary

    def to_config(self, *, max_seq_len: int | None = None, form: str = "rope_parameters") -> dict[str, Any]:
        """The keys of a configuration with which `transformers` and vLLM rotate as this encoding does.

        Args:
            max_seq_len: the longest sequence, where the scaling does not imply it.
            form: ``"rope_parameters"``, or ``"rope_scaling"`` for earlier releases of both programs.
        """
        from locant.models.rotary_to_config import rotary_to_config, warn_of_servers

        warn_of_servers(self)
        return rotary_to_config(self, max_seq_len=max_seq_len, form=form)

    def for_length(self, seq_len: int) -> Rotary:
        """This encoding for sequences of `seq_len` tokens in all, generated ones included.

        Only scalings that depend on the length (`DynamicNTK`, `LongRoPE`) need it, and only past their trained length.
        The frequencies of the copy are fixed, so keys cached under it stay right; `rerotate` moves them to another.

        >>> from locant.positions.scaling import DynamicNTK
        >>> rotary = Rotary(64, scaling=DynamicNTK(factor=4.0, original_max_seq_len=2048)).for_length(8192)
        """
        return self.alike(seq_len=seq_len)

    @property
    def is_short(self) -> bool:
        """Whether its table of pairs was written by ``layout``, ``rotary_dim``, ``sections`` and ``axial``."""
        return self._own_pairs is None

    def alike(self, **options: Any) -> Rotary:
        """This encoding with other options, as for the constructor.

        >>> Rotary(64, layout="interleaved").alike(angles="float32")
        Rotary(head_dim=64, base=10000, layout='interleaved', angles='float32')
        """
        table = ("layout", "rotary_dim", "sections", "axial") if self.is_short else ("pairs",)
        names = ("base", "scaling", "seq_len", "temperature", *table)
        same: dict[str, Any] = {name: getattr(self, name) for name in names} | {"angles": self.angles.mode}
        rotary = Rotary(self.head_dim, **same | options)
        rotary.layer_types = self.layer_types
        return rotary

    def rerotate(
        self, k: Float[Tensor, "batch kv_heads key head_dim"], positions: Positions, from_len: int, to_len: int
    ) -> Float[Tensor, "batch kv_heads key head_dim"]:
        """Keys that were rotated under ``for_length(from_len)``, as ``for_length(to_len)`` would have rotated them.

        One more rotation, by the difference of the two angles: a cache grows without the unrotated keys. Values need
        nothing. Exact but for one more rounding to the dtype of `k`.
        """
        require_heads("k", k, positions, self.head_dim)
        before, after = (self.for_length(length)._wide_cos_sin(positions) for length in (from_len, to_len))
        return self._rotated_by(k, before, after)

    def move(
        self, k: Float[Tensor, "batch kv_heads key head_dim"], positions: Positions, to: Positions
    ) -> Float[Tensor, "batch kv_heads key head_dim"]:
        """Keys that were rotated at `positions`, as they would have been rotated at `to`.

        For cached keys that change place: a text in the middle is dropped and what follows moves up (StreamingLLM), or
        a document that was read by itself stands after others. As exact as `rerotate`, however far it goes.

        >>> k, here, there = torch.randn(1, 2, 3, 8), Positions.arange(3), Positions.after(1_000_000, 3)
        >>> rotary = Rotary(8)
        >>> moved = rotary.move(rotary.rotate_one(k, here), here, there)
        >>> torch.allclose(moved, rotary.rotate_one(k, there), atol=1e-6)
        True
        """
        require_heads("k", k, positions, self.head_dim)
        require_heads("k", k, to, self.head_dim)
        return self._rotated_by(k, self._wide_cos_sin(positions), self._wide_cos_sin(to))

    def _wide_cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """In float64; where its device has none, on the CPU."""
        return self.cos_sin(positions if has_float64(positions.device) else positions.to("cpu"), torch.float64)

    def _rotated_by(self, k: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
        """Keys that were rotated by these cosines and sines, as if by those."""
        (cos_before, sin_before), (cos_after, sin_after) = before, after
        size = self.scaling.effective_attention_factor**2  # dividing by e^(ia) m is multiplying by e^(-ia) / m
        cos = (cos_after * cos_before + sin_after * sin_before) / size
        sin = (sin_after * cos_before - cos_after * sin_before) / size
        dtype = torch.promote_types(k.dtype, torch.float32)
        cos, sin = cos.to(dtype).to(k.device), sin.to(dtype).to(k.device)
        if self._in_order is None:
            return rotate_pairs(k, cos, sin, self.layout)
        channels, _ = self._in_order
        return channels.scatter(rotate_pairs(channels.gather(k), cos, sin, channels.layout), k)

    def cos_sin(
        self, positions: Positions | int, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "batch seq pairs"], Float[Tensor, "batch seq pairs"]]:
        """The cosine and sine by which each pair of each token is rotated, times the attention factor.

        Of so many positions from 0 on for a number.
        """
        positions = positions_or_length(positions)
        index, tables = self._index_and_tables(positions)
        return cos_sin(index, tables, dtype)

    @property
    def inv_freq(self) -> Float[Tensor, " pairs"]:
        """The inverse frequencies after scaling, in radians per position; float64, on the CPU.

        >>> Rotary(8).inv_freq.tolist()
        [1.0, 0.1, 0.01, 0.001]
        """
        return self.angles.inv_freq

    @property
    def inv_freq_float32(self) -> Float[Tensor, " pairs"]:
        """The inverse frequencies as `transformers` computes them, in float32; on the CPU.

        Other programs that start from an ``inv_freq`` want these; they differ from `inv_freq` in their last bits.
        """
        return self.pairs.frequencies(self.scaling, self.base, self.seq_len)[1]

    def cos_sin_cache(self, n: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n rotary_dim"]:
        """The cosines of the positions 0 to n - 1 beside their sines: the table that serving engines keep.

        vLLM (``cos_sin_cache`` of its rotary classes), SGLang and FlashInfer read it, whichever dimensions they pair.
        With ``angles="float32"`` it has the bits of theirs, but for a rounding of `DynamicNTK`'s base. In bfloat16 a
        cosine is off by up to 0.002, and in float16 by up to 0.00024, whatever the angles. For a scaling that depends
        on the length, see `for_length`; vLLM's cache for `LongRoPE` holds two tables, that of the trained length first.

        Args:
            n: positions; the table holds n * rotary_dim numbers.

        >>> Rotary(4).cos_sin_cache(2)
        tensor([[1.0000, 1.0000, 0.0000, 0.0000],
                [0.5403, 0.9999, 0.8415, 0.0100]])
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise RangeError(f"got {shown(dtype)} for dtype, expected a floating dtype of torch", "torch.float32")
        cos, sin = self.cos_sin(Positions.arange(n), torch.promote_types(dtype, torch.float32))
        return torch.cat([cos[0], sin[0]], dim=-1).to(dtype)

    def tables(self, n: int, like: Literal["numpy", "torch"] = "numpy") -> tuple[Any, Any]:
        """The cosines and the sines of the positions 0 to n - 1, each float32 ``[n, pairs]``.

        As arrays of NumPy they go into JAX, MLX and ONNX as they are.

        >>> cos, sin = Rotary(4).tables(3)
        >>> type(cos).__name__, cos.shape, cos.dtype
        ('ndarray', (3, 2), dtype('float32'))
        """
        one_of("like", like, ("numpy", "torch"), "like='numpy'")
        tables = (table[0] for table in self.cos_sin(Positions.arange(n)))
        cos, sin = ((table.numpy() if like == "numpy" else table) for table in tables)
        return cos, sin

    def rotate_one(self, x: Rotated, positions: Where = None) -> Rotated:
        """One tensor rotated by itself, queries or keys: what `rotate` makes of it, but for a temperature of queries.

        >>> Rotary(2).rotate_one(torch.tensor([[[[1.0, 0.0]]]]), Positions.after(1, 1))
        tensor([[[[0.5403, 0.8415]]]])
        """
        if _has_no_heads(x):
            return self.rotate_one(x[:, None], positions)[:, 0]
        positions = require_heads("x", x, positions, self.head_dim, self.num_axes)
        if self._in_order is not None:
            channels, ordered = self._in_order
            return channels.scatter(ordered.rotate_one(channels.gather(x), positions), x)
        return rotate(x, None, *self._index_and_tables(positions), self.layout)[0]

    def rotate(
        self, q: Rotated, k: RotatedKeys, positions: Where = None, k_positions: Where = None, *, inplace: bool = False
    ) -> tuple[Rotated, RotatedKeys]:
        """Rotated queries and keys, in the dtype they came in; the arithmetic is float32 at least.

        Where there are no heads, they are ``batch seq head_dim``.

        With `inplace`, `q` and `k` may be the same elements, which are rotated once; elements that only some of both
        share are refused before anything is written, as is what torch cannot overwrite.
        """
        if _has_no_heads(q) and _has_no_heads(k):
            q, k = self.rotate(q[:, None], k[:, None], positions, k_positions, inplace=inplace)
            return q[:, 0], k[:, 0]
        for name, x in (("q", q), ("k", k)):
            if x is None:
                raise ShapeError(f"got None for {name}, expected a tensor", "encoding.rotate_one(x, positions)")
        if positions is None:
            positions, _ = standing(self, q, k, positions, k_positions)
        keys = positions if k_positions is None else k_positions
        if self.temperature is None:
            return self._rotate(q, k, positions, keys, inplace)
        if inplace and isinstance(q, Tensor) and isinstance(k, Tensor) and require_writable(q, k):
            raise ShapeError("got one tensor as q and k, of which queries alone have a temperature", "k.clone()")
        rotated_q, rotated_k = self._rotate(q, k, positions, keys, inplace)
        return self.temperature.grown(rotated_q, positions, inplace=inplace), rotated_k

    def _rotate(
        self, q: Tensor, k: Tensor, positions: Positions, keys: Positions, inplace: bool
    ) -> tuple[Tensor, Tensor]:
        require_heads("q", q, positions, self.head_dim)
        require_heads("k", k, keys, self.head_dim)
        if self._in_order is not None:
            channels, ordered = self._in_order
            if inplace:
                require_writable(q, k)
            rotated_q, rotated_k = ordered.rotate(channels.gather(q), channels.gather(k), positions, keys)
            rotated_q, rotated_k = channels.scatter(rotated_q, q), channels.scatter(rotated_k, k)
            return (q.copy_(rotated_q), k.copy_(rotated_k)) if inplace else (rotated_q, rotated_k)
        if keys is not positions or k.dtype != q.dtype:
            return self._rotate_each(q, k, positions, keys, inplace)
        index, tables = self._index_and_tables(positions)
        return rotate(q, k, index, tables, self.layout, inplace=inplace)

    def unrotate(self, y: Rotated, positions: Where = None) -> Rotated:
        """The inverse of `rotate_one`: rotated by the negative angles, and divided by the attention factor.

        >>> y, where = torch.randn(1, 2, 5, 8), Positions.arange(5)
        >>> torch.allclose(Rotary(8).unrotate(Rotary(8).rotate_one(y, where), where), y, atol=1e-6)
        True
        """
        if _has_no_heads(y):
            return self.unrotate(y[:, None], positions)[:, 0]
        positions = require_heads("y", y, positions, self.head_dim, self.num_axes)
        if self._in_order is not None:
            channels, ordered = self._in_order
            return channels.scatter(ordered.unrotate(channels.gather(y), positions), y)
        index, tables = self._index_and_tables(positions)
        tables = tables._replace(attention_factor=1 / tables.attention_factor)
        return rotate(y, None, index, tables, self.layout, inverse=True)[0]

    def _rotate_each(
        self, q: Tensor, k: Tensor, positions: Positions, keys: Positions, inplace: bool
    ) -> tuple[Tensor, Tensor]:
        """One after the other, where they differ in positions or dtype; all that can be wrong is found out before."""
        if len(q) != len(k):
            got = f"got q for {len(q)} rows and k for {len(k)}, expected one batch"
            raise ShapeError(got, "q and k of one batch, such as k.expand(len(q), -1, -1, -1)")
        of_q, of_k = self._index_and_tables(positions), self._index_and_tables(keys)
        same = inplace and require_writable(q, k)
        if inplace and (is_transformed() or not has_values(q)):  # what overlaps is not known then
            rotated_q, rotated_k = self._rotate_each(q, k, positions, keys, False)
            return q.copy_(rotated_q), k.copy_(rotated_k)
        if same:
            if positions != keys:
                raise ShapeError("got one tensor as q and k to rotate in place, at two sets of positions", "k.clone()")
            return rotate(q, k, *of_q, self.layout, inplace=True)
        rotated_q, _ = rotate(q, None, *of_q, self.layout, inplace=inplace)
        return rotated_q, rotate(k, None, *of_k, self.layout, inplace=inplace)[0]

    def _index_and_tables(self, positions: Positions) -> tuple[Int[Tensor, "batch seq *axes"], Tables]:
        """What the kernels need to know of these positions."""
        longest, parts = self.scaling.length_that_matters, positions.denominator
        if longest is not None:
            limit = max(self.seq_len or 0, longest)
            name = f"{type(self.scaling).__name__} for {limit} tokens"
            remedy = "rotary.for_length(seq_len) with the length of the whole sequence"
            positions.require_within(-MAX_INT32, limit * parts - 1, name, remedy)
        if self.pairs.num_axes == 1 or positions.axes == 1:
            if positions.axes != 1:  # else they may be in parts
                positions.require_single_axis("Rotary without sections")
            index, choice = positions.index, None
            index = index if index.ndim == 2 else index.flatten(1)
        elif self.pairs.num_axes == positions.axes:
            index, choice = positions.index, self._axis_of_pair.on(positions.device)
        else:
            what = f"{self.pairs.num_axes} sections" if self.sections else f"pairs of {self.pairs.num_axes} axes"
            got = f"got positions with {positions.axes} axes for {what}"
            raise ShapeError(got, "Rotary(sections=...) with one section per axis")
        angles = self.angles if parts == 1 else self._over(parts)
        return index, angles.tables(positions.device, positions.max_index, positions.min_index, choice)

    def _over(self, denominator: int) -> Angles:
        """The angles of a position's parts: every frequency is divided, and the index stays whole."""
        if denominator not in self._angles_over:
            if torch.compiler.is_compiling():
                got = f"got positions in parts of 1/{denominator} for the first time in a graph"
                raise LocantError(got, "encoding.cos_sin(positions) once before it is compiled")
            if len(self._angles_over) > MOST_DENOMINATORS:
                del self._angles_over[next(each for each in self._angles_over if each != 1)]
            frequencies, rounded = self.pairs.frequencies(self.scaling, self.base, self.seq_len)
            self._angles_over[denominator] = Angles(
                [PRECISION.divide(each, denominator) for each in frequencies],
                self.angles.mode,
                rounded=rounded / denominator,
                attention_factor=self.angles.attention_factor,
            )
        return self._angles_over[denominator]

    def _example_call(self, door: str) -> str:
        return super()._example_call(door) + ", or encoding.rotate_one(x, positions) for one tensor"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for key in LEGACY_KEYS:
            state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        partial = f", rotary_dim={self.rotary_dim}" if self.rotary_dim != self.head_dim else ""
        partial += "" if self.is_short else f", pairs={self.pairs}"
        scaling = "" if isinstance(self.scaling, Unscaled) else f", scaling={self.scaling}"
        sections = "" if self.sections is None else f", sections={self.sections}, axial={self.axial}"
        length = "" if self.seq_len is None else f", seq_len={self.seq_len}"
        length += "" if self.temperature is None else f", temperature={self.temperature}"
        shape = f"head_dim={self.head_dim}, base={self.base:g}{partial}{scaling}{sections}{length}"
        return f"{shape}, layout={self.layout!r}, angles={self.angles.mode!r}"


def _has_no_heads(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3


def _require_alone(pairs: Any, **short: Any) -> None:
    if not isinstance(pairs, Pairs):
        raise RangeError(f"got {shown(pairs)} for pairs, expected a table of them", "locant.positions.Pairs(dims=...)")
    plain = {"layout": "half", "rotary_dim": None, "sections": None, "axial": False}
    beside = [name for name, value in short.items() if np.ndim(value) or value != plain[name]]
    if beside:
        got = f"got pairs beside {' and '.join(beside)}, which are short ways to write a table of pairs"
        raise RangeError(got, f"pairs without {beside[0]}")
