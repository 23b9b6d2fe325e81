"""Rotations by running sums of learned angles: Selective RoPE (Movahedi et al. 2025, arXiv 2511.17388)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, flag, one_of, whole
from locant.errors import LocantError, RangeError
from locant.kernels.exact_dot import exact_dot, round_to_grid
from locant.kernels.transforms import hides_gradient, is_differentiated
from locant.positions.base import Embeddings, EncodingInfo, Output, require_embeddings
from locant.positions.constant import Constant
from locant.positions.distances import bias_dtype
from locant.positions.documents import PADDING
from locant.positions.earlier_tokens import require_earlier_tokens
from locant.positions.encodings.rotary_by_head import PerHeadRotation
from locant.positions.fields import TokenFeatures
from locant.positions.frequencies import inverse_frequencies
from locant.positions.hidden_bias import REMEDY, project
from locant.positions.positions import OptionalPositions, Positions, require_positions
from locant.positions.running_sums import CHUNK_ELEMENTS, document_order
from locant.spelling import literal

UNITS_PER_TURN = 2**52
"""Angles are whole numbers of this unit. A float64 holds each angle below one turn exactly."""
WHOLE_TURNS = 64 - 52
"""The number of bits of an int64 that count whole turns."""
NORM_EPSILON = 1e-6
"""The number that the authors add to the squared length of a vector before they divide by the length."""

Features = Float[Tensor, "batch seq heads features"]
AngleSteps = Float[Tensor, "batch seq heads pairs"]


class RunningAngles(PerHeadRotation):
    """The base class of rotations whose angle is a running sum of angles that depend on hidden states.

    A model calls `read` in every layer, with the hidden states from which queries and keys are projected, and passes
    the returned positions to `rotate` and to its cache.

    The sum is exact: each token's angle is rounded once, to 2**-52 of a turn, and the rounded angles are added as
    integers, modulo one turn. Integers have the same sum in any order. So a row that is padded, packed, cached, in
    pieces or on several ranks has the same bits as the row alone, if its angles do. The rounding moves a sum by at
    most 7e-16 radians per token, at any length. Gradients pass the rounding unchanged. Sums start at zero in each
    document.

    Args:
        head_dim, num_heads, base: as in `PerHeadRotation`.
        d_model: the width of the hidden states.

    >>> class Loud(RunningAngles):
    ...     '''Every pair of every head rotates by the mean of the hidden state.'''
    ...     def of_hidden(self, x):
    ...         return x.double().mean(-1)[..., None, None].expand(-1, -1, self.num_heads, self.head_dim // 2)
    >>> loud, x, q = Loud(2, 1, 8), torch.full((1, 3, 8), math.pi / 2), torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
    >>> loud.rotate_one(q, loud.read(x, Positions.arange(3)))[0, 0].round().int()
    tensor([[ 0,  1],
            [-1,  0],
            [ 0, -1]], dtype=torch.int32)
    """

    width: int = 1
    """The number of tokens on which the angle of a token depends: the token itself and the tokens before it."""

    def __init__(self, head_dim: int, num_heads: int, d_model: int, base: Real = 10_000.0) -> None:
        super().__init__(head_dim, num_heads, base)
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the hidden states")

    def of_hidden(self, x: Embeddings) -> Features:
        """Return the numbers of each token from which `steps` computes angles. Subclasses implement it.

        A cache stores them, so they must depend on the token alone. The result is in float64. Its bits must not depend
        on other tokens: see `locant.kernels.exact_dot`. `x` is zero at padding.
        """
        raise LocantError(f"{type(self).__name__} does not define of_hidden", "def of_hidden(self, x)")

    def steps(self, window: Sequence[Features]) -> AngleSteps:
        """Return the angle in radians that each token adds, in float64. By default these are its features.

        `window` holds the features of the token itself, of the token before it, and so on: `width` tensors. Features
        of tokens before the beginning of the document are zero.
        """
        return window[0]

    def read(self, x: Embeddings, positions: Positions, past: Positions | None = None) -> Positions:
        """Return `positions` with the angle of each token in every head, and the features that later tokens need.

        Raises:
            LocantError: tokens before these ones are known to be missing, as in a shard or in a decoding step without
                `past`.
        """
        past = past if past is not None and past.seq_len else None
        features = self._features(x, positions)
        if past is None:
            require_earlier_tokens(
                positions, type(self).__name__, of_cache="past=cache.positions",
                of_shard="locant.parallel.read_hidden_states(encoding, x, positions)",
            )  # fmt: skip
        rows = positions.expand(x.shape[0])
        return dataclasses.replace(rows, read=TokenFeatures(of_key=self._with_angles(features, rows, past)))

    def read_shard(self, x: Embeddings, positions: Positions) -> Positions:
        """Return the positions with features alone. `of_row` computes the angles from the features of all ranks."""
        return dataclasses.replace(
            positions.expand(x.shape[0]), read=TokenFeatures(of_key=self._features(x, positions))
        )

    def _features(self, x: Embeddings, positions: Positions) -> Features:
        require_positions(positions)
        require_embeddings(self, x, positions, self.d_model)
        if positions.document_or_none is not None:
            x = x.masked_fill((positions.document_or_none == PADDING)[..., None], 0.0)
        return self.of_hidden(x)

    def of_row(
        self, queries: Tensor | None, keys: Tensor, row: Positions, rank: int, ranks: int
    ) -> tuple[Tensor | None, Tensor]:
        """Return the angles of a whole row, from the features that every rank has read from its tokens."""
        return queries, self._with_angles(keys, row, None)

    def unrotate(self, y: Output, positions: OptionalPositions = None) -> Output:
        """Undo the rotation, for values with the same rotation as the keys."""
        return self._rotate_tensor("y", y, positions, inverse=True)

    def cos_sin_per_head(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        turns = self._turns(positions).transpose(1, 2)
        angle = turns * (2 * math.pi)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _turns(self, positions: Positions) -> AngleSteps:
        """Return the angle of each token, as a fraction of a turn."""
        if positions.read.of_key is None:
            got = f"got positions without the features that {type(self).__name__} reads from hidden states"
            raise LocantError(got, REMEDY)
        return positions.read.of_key[..., : self.head_dim // 2]

    def _with_angles(
        self, features: Features, positions: Positions, past: Positions | None
    ) -> Float[Tensor, "batch seq heads pairs_and_features"]:
        """Return the running sum of each token's angle, followed by its features."""
        if positions.start is None:
            slots, begins = document_order(positions)
            document = positions.document.gather(1, slots)
            ordered = _gather_tokens(features, slots)
        else:
            slots, document, ordered = None, positions.document, features
            begins = torch.arange(positions.seq_len, device=features.device).expand(len(features), -1) == 0
        slot = torch.arange(positions.seq_len, device=features.device)
        first = torch.where(begins, slot, 0).cummax(1).values  # of the document
        cached = None if past is None else self._last_cached(document, positions.start is not None, past)
        window = [self._shift(ordered, back, slot - first, cached) for back in range(self.width)]
        turns = self.steps(window) / (2 * math.pi)
        before = turns.new_zeros(()) if cached is None else cached[:, :, 0, :, : self.head_dim // 2]
        sums = _sum_turns(turns, first, before)
        if slots is not None:
            sums = _gather_tokens(sums, slots.argsort(dim=1))
        return torch.cat([sums, features], dim=-1)

    def _shift(self, ordered: Features, back: int, place: Int[Tensor, "batch seq"], cached: Tensor | None) -> Features:
        """Return the features of the token that is `back` tokens earlier in its document, or zeros.

        `place` is the number of new tokens of the document before each token.
        """
        if back == 0:
            return ordered
        earlier = F.pad(ordered, (0, 0, 0, 0, back, 0))[:, : ordered.shape[1]]
        is_new = (place >= back)[..., None, None]
        if cached is None:
            return earlier.where(is_new, 0.0)
        last = (back - place - 1).clamp(0, self.width - 2)  # 0 is the last cached token
        of_cache = cached[..., self.head_dim // 2 :].expand(-1, ordered.shape[1], -1, -1, -1)
        index = last[:, :, None, None, None].expand(*of_cache.shape[:2], 1, *of_cache.shape[3:])
        return torch.where(is_new, earlier, of_cache.gather(2, index)[:, :, 0])

    def _last_cached(
        self, document: Int[Tensor, "batch seq"], is_counting: bool, past: Positions
    ) -> Float[Tensor, "batch some last heads pairs_and_features"]:
        """Return what the cache holds of the last tokens of each new token's document, the last first, or zeros."""
        if past.read.of_key is None:
            got = f"got past without the features that {type(self).__name__} reads from hidden states"
            raise LocantError(got, REMEDY)
        read, count = past.read.of_key.expand(len(document), -1, -1, -1), max(1, self.width - 1)
        missing = max(0, count - past.seq_len)
        if is_counting and past.start is not None:
            return F.pad(read[:, past.seq_len - count + missing :].flip(1), (0, 0, 0, 0, 0, missing))[:, None]
        parts = []
        for part in document.split(max(1, CHUNK_ELEMENTS // max(past.document.numel(), 1)), dim=1):
            nowhere = torch.iinfo(past.order.dtype).min
            order = torch.where(part[:, :, None] == past.document[:, None], past.order[:, None], nowhere)
            last = order.topk(count - missing, dim=-1)
            gathered = _gather_tokens(read, last.indices.flatten(1)).unflatten(1, last.indices.shape[1:])
            parts.append(gathered.where((last.values > nowhere)[..., None, None], 0.0))
        return F.pad(torch.cat(parts, dim=1), (0, 0, 0, 0, 0, missing))


def _gather_tokens(x: Tensor, slots: Int[Tensor, "batch some"]) -> Tensor:
    return x.gather(1, slots[..., None, None].expand(-1, -1, *x.shape[2:]))


def _sum_turns(turns: AngleSteps, first: Int[Tensor, "batch seq"], before: Tensor) -> AngleSteps:
    """Return running sums from the token `first` on, plus `before`, exact and modulo one turn: -1/2 to 1/2.

    int64 overflows by whole turns, so no length is too long. Gradients are those of the sums without rounding. If an
    angle is not finite, it and the later sums of its document are NaN.
    """

    def within_documents(steps: Tensor) -> Tensor:
        sums = steps.cumsum(1)
        return sums - _gather_tokens(sums - steps, first)

    is_finite = turns.isfinite().flatten(2).all(-1)[..., None, None]
    turns = turns.where(is_finite, 0.0)
    fixed = within_documents((turns.frac() * UNITS_PER_TURN).round().long()) + (before * UNITS_PER_TURN).long()
    exact = (fixed << WHOLE_TURNS).to(turns.dtype) * 2.0**-64  # the shift drops whole turns
    exact = exact.masked_fill((within_documents((~is_finite).long()) > 0) | before.isnan(), torch.nan)
    if not any(x.requires_grad or hides_gradient(x) for x in (turns, before)) and not is_differentiated(turns, before):
        return exact
    smooth = within_documents(turns) + before
    return exact + (smooth - smooth.detach())  # adds zero


class SelectiveRoPE(RunningAngles):
    r"""RoPE whose angle grows by a learned amount at each token, which depends on the hidden states.

    .. math:: \omega_t = \sum_{k=0}^{K-1} c_k \odot W_2 W_1 \hat{x}_{t-k}, \qquad
        \text{angle}_{t,p} = \text{base}^{-2p/d} \sum_{s \le t} g_s \, (\omega_{s,p} + b_p)

    :math:`\hat{x}` is the hidden state with each head's part scaled to length 1, c is a causal convolution of each pair
    by itself, and the gate g and the offset b are options. The rotation between two tokens is the sum of the angles of
    the tokens between them, so a head can count some tokens and ignore others. With angles of 1 it is `Rotary`.

    A model calls `read` in every layer, with the hidden states from which queries and keys are projected, and passes
    the returned positions to `rotate` and to its cache. In the paper every layer has its own angles, so build an
    encoding for each layer. Query heads share the angles of their key/value head. For a row on several ranks, call
    `locant.parallel.read_hidden_states`.

    Rows have the same bits, alone, padded, packed, cached or on several ranks, for hidden states of 32 bits or fewer:
    see `RunningAngles`.

    Args:
        head_dim: dimensions per head. Dimension i pairs with i + head_dim / 2.
        num_heads: the number of key/value heads, which divides `d_model`. The number of query heads is a multiple.
        d_model: the width of the hidden states.
        rank: the width between the two matrices of the projection. With ``None``, each head has one matrix, for its
            part of the hidden state, with columns of equal length.
        kernel_size: the number of tokens of the convolution. With 1 it is a factor for each pair. The first row of
            `kernel` belongs to the token itself, which is the last number of a kernel of ``nn.Conv1d``.
        activation: the activation after the convolution.
        gate: whether each head multiplies its angles by a gate, the sigmoid of a projection.
        offset: whether each pair adds a learned positive angle at every token. It begins at 1, which is plain RoPE.
        base: the base of the temperatures, by which the sums of each pair are multiplied.
        learn_temperature: whether the temperatures are learned.

    Limits:
        It ignores the index. Cached keys cannot be moved. A cache stores two float64 numbers per pair and head for each
        token, because a truncated cache needs the sum of an earlier token. `locant.swap` does not support it, because
        no hidden states are available there. The authors' option ``skip_conv`` is missing: its angles are not sums.

    Tested against:
        The paper's formula in NumPy, forward and every gradient, and `Rotary` for angles of 1.

    >>> selective, x, q = SelectiveRoPE(64, 8, 512), torch.randn(2, 5, 512), torch.randn(2, 8, 5, 64)
    >>> positions = selective.read(x, Positions.arange(5))
    >>> selective.rotate(q, q, positions)[0].shape
    torch.Size([2, 8, 5, 64])
    """

    info = EncodingInfo(
        name="selective_rope",
        aliases=("selective_rotary", "selective"),
        kind="relative",
        parameters="rank x (d_model + pairs) + kernel_size x pairs, for the pairs of all heads",
        cost_of_tokens="in every layer, 2 rank products, a convolution, and cosines and sines for each head",
        cost_of_pairs="nothing",
        extrapolation="depends on the learned angles: a head that adds none for most tokens sees no new angles",
        used_by="its paper's models",
        paper="Movahedi 2025, arXiv 2511.17388",
    )

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        d_model: int,
        *,
        rank: int | None = 16,
        kernel_size: int = 4,
        activation: Literal["silu"] | None = None,
        gate: bool = False,
        offset: bool = False,
        base: Real = 500_000.0,
        learn_temperature: bool = False,
    ) -> None:
        super().__init__(head_dim, num_heads, d_model, base)
        if self.d_model % self.num_heads:
            got = f"got d_model={self.d_model} for num_heads={self.num_heads}, expected a multiple"
            raise RangeError(got, f"d_model={self.num_heads * max(1, self.d_model // self.num_heads)}")
        self.rank = None if rank is None else whole("rank", rank, 1, MAX_WIDTH, remedy="rank=16")
        self.kernel_size = self.width = whole("kernel_size", kernel_size, 1, MAX_WIDTH, remedy="kernel_size=4")
        if activation is not None:
            one_of("activation", activation, ("silu",), "activation='silu', or None")
        self.activation = activation
        self.gate, self.offset = flag("gate", gate), flag("offset", offset)
        self.learn_temperature = flag("learn_temperature", learn_temperature)
        pairs = self.head_dim // 2
        if self.rank is None:
            self.weight = nn.Parameter(torch.empty(self.num_heads, pairs, self.d_model // self.num_heads))
            self.length = nn.Parameter(torch.empty(self.num_heads))
        else:
            self.down = nn.Parameter(torch.empty(self.rank, self.d_model))
            self.up = nn.Parameter(torch.empty(self.num_heads * pairs, self.rank))
        self.kernel = nn.Parameter(torch.empty(self.kernel_size, self.num_heads, pairs))
        self.log_offset = nn.Parameter(torch.empty(self.num_heads, pairs)) if self.offset else None
        self.gate_weight = nn.Parameter(torch.empty(self.num_heads, self.d_model)) if self.gate else None
        self.gate_offset = nn.Parameter(torch.empty(self.num_heads)) if self.gate else None
        frequencies = torch.tensor(
            [*map(float, inverse_frequencies(self.head_dim, self.base))], dtype=torch.float64, device="cpu"
        )
        self._frequencies = Constant(frequencies)
        self.temperature = nn.Parameter(torch.empty(pairs)) if self.learn_temperature else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            match name:
                case "length":
                    nn.init.ones_(parameter)
                case "log_offset":
                    nn.init.zeros_(parameter)
                case "temperature":
                    with torch.no_grad():
                        parameter.copy_(self._frequencies.on(parameter.device))
                case "kernel":
                    nn.init.uniform_(parameter, -(self.kernel_size**-0.5), self.kernel_size**-0.5)
                case "weight":
                    nn.init.uniform_(parameter, -((6 / parameter.shape[-1]) ** 0.5), (6 / parameter.shape[-1]) ** 0.5)
                case _:  # as in `nn.Linear`
                    width = self.d_model if name == "gate_offset" else parameter.shape[-1]
                    nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def of_hidden(self, x: Embeddings) -> Features:
        """Return the projected angles, followed by the gate of each head if there are gates."""
        dtype, pairs = bias_dtype(x), self.head_dim // 2
        heads = x.unflatten(-1, (self.num_heads, -1))
        on_grid = heads if dtype == torch.float64 else round_to_grid(heads)  # sums of squares in any order are equal
        length = (on_grid.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()
        scaled = (heads.double() / length).to(dtype)
        if self.rank is None:
            weight = self.length[:, None, None] * F.normalize(self.weight, dim=-1)
            angles = exact_dot(scaled.transpose(1, 2), weight, dtype).transpose(1, 2)
        else:
            narrow = project(scaled.flatten(2), self.down, dtype)
            angles = project(narrow, self.up, torch.float64).unflatten(-1, (self.num_heads, pairs))
        if self.gate_weight is None or self.gate_offset is None:
            return angles
        logits = project(scaled.flatten(2), self.gate_weight, torch.float64) + self.gate_offset.double()
        return torch.cat([angles, logits.sigmoid()[..., None]], dim=-1)

    def steps(self, window: Sequence[Features]) -> AngleSteps:
        """Return the convolved angles, with offset, gate and temperature."""
        pairs, kernel = self.head_dim // 2, self.kernel.double()
        steps = window[0][..., :pairs] * kernel[0]
        for features, weight in zip(window[1:], kernel[1:], strict=True):
            steps = steps + features[..., :pairs] * weight
        if self.activation == "silu":
            steps = F.silu(steps)
        if self.log_offset is not None:
            steps = steps + self.log_offset.double().exp()
        if self.gate:
            steps = steps * window[0][..., pairs:]
        temperature = self._frequencies.on(steps.device) if self.temperature is None else self.temperature.double()
        return steps * temperature

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.head_dim}, num_heads={self.num_heads}, d_model={self.d_model}, rank={self.rank}"
        rest = f"kernel_size={self.kernel_size}, base={literal(self.base)}"
        options = {"activation": self.activation} if self.activation else {}
        options |= {name: True for name in ("gate", "offset", "learn_temperature") if getattr(self, name)}
        return ", ".join([sizes, rest, *(f"{name}={value!r}" for name, value in options.items())])
