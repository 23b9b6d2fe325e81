"""RoPE with bounded distances, for texts beyond the trained length: ReRoPE, Self-Extend, dual chunk attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from locant.arguments import MAX_INT32, whole
from locant.positions.base import EncodingInfo, ModelShape, build
from locant.positions.documents import PADDING
from locant.positions.encodings.rotary import Rotary
from locant.positions.positions import Positions
from locant.positions.rotary_by_class import PairClass, RotaryByClass, near_and_far


class ReRoPE(RotaryByClass):
    r"""Rotates near keys as in training, and all other keys as if they were at the end of a window.

    .. math:: \text{distance}(i, j) = \min(i - j, w)

    No distance is larger than `window`, so a model reads texts of any length without training. The author (Su 2023,
    https://kexue.fm/archives/9708) also multiplies queries beyond the trained length L by ``log(n + 1) / log L``. The
    caller has to do that.

    Args:
        rotary: the rotation that the model was trained with.
        window: the largest distance, less than the trained length.

    Limits:
        It supports only causal attention through `attend`, without a sliding window. Positions do not distinguish
        tokens beyond the window. It costs as much as `SelfExtend`.

    Tested against:
        Attention in NumPy with the distance of every pair, forward and every gradient.

    >>> import locant
    >>> encoding = ReRoPE(Rotary(16), window=6)
    >>> q, k, positions = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), Positions.arange(20)
    >>> locant.attend(*encoding.rotate(q, k, positions), k, encoding=encoding, positions=positions).shape
    torch.Size([1, 4, 20, 16])
    """

    info = EncodingInfo(
        name="rerope",
        aliases=("rectified_rope",),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, twice the cost of rotary",
        cost_of_pairs="nothing",
        extrapolation="without training, to any length; beyond the window all distances are equal",
        used_by="rerope",
        paper="Su 2023, https://kexue.fm/archives/9708",
    )

    def __init__(self, rotary: Rotary, window: int = 512) -> None:
        super().__init__(rotary)
        self.window = whole("window", window, 1, remedy="use a window below the trained length, such as window=512")

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> ReRoPE:
        """Build the encoding with a window of half the trained length."""
        return build(cls, {"rotary": Rotary(shape.head_dim), "window": max(1, shape.max_seq_len // 2)} | options)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """Return two classes: the keys within the window, and all earlier keys."""
        far, far_keys = lambda index: index * 0 + self.window, lambda index: index * 0
        return near_and_far(positions, k_positions, self.window, far, far_keys)

    def extra_repr(self) -> str:
        return f"{self.rotary}, window={self.window}"


class SelfExtend(RotaryByClass):
    r"""Rotates near keys as in training, and far keys by the position of their group of tokens.

    .. math:: \text{distance}(i, j) = \begin{cases} i - j & i - j < w \\
        \lfloor i / G \rfloor - \lfloor j / G \rfloor + w - \lfloor w / G \rfloor & \text{otherwise}\end{cases}

    w is `neighbours`, and G is `group`, the number of tokens in a group. Up to ``(L - w) * G + w`` tokens, no distance
    exceeds the trained length L, so a model reads longer texts without training (Jin et al. 2024,
    https://arxiv.org/abs/2401.01325).

    Args:
        rotary: the rotation that the model was trained with.
        group: the number of far tokens that share a position.
        neighbours: the distance from which tokens are far, less than the trained length.

    Limits:
        It supports only causal attention through `attend`, without a sliding window. Positions do not distinguish far
        tokens of one group. It needs two rotations. With a cache, it rotates all cached keys in every step.

    Tested against:
        Attention in NumPy with the distance of every pair, forward and every gradient.

    >>> import locant
    >>> encoding = SelfExtend(Rotary(16), group=4, neighbours=6)
    >>> q, k, positions = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), Positions.arange(20)
    >>> locant.attend(*encoding.rotate(q, k, positions), k, encoding=encoding, positions=positions).shape
    torch.Size([1, 4, 20, 16])
    """

    info = EncodingInfo(
        name="self_extend",
        aliases=("longlm",),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, twice the cost of rotary",
        cost_of_pairs="nothing",
        extrapolation="without training, to the group size times the trained length, at coarser distances",
        used_by="LongLM, llama.cpp",
        paper="Jin 2024, arXiv 2401.01325",
    )

    def __init__(self, rotary: Rotary, group: int = 8, neighbours: int = 1024) -> None:
        super().__init__(rotary)
        self.group = whole("group", group, 1, remedy="group=8")
        remedy = "use a number below the trained length, such as neighbours=1024"
        self.neighbours = whole("neighbours", neighbours, 1, remedy=remedy)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> SelfExtend:
        """Build the encoding with half the trained length as `neighbours`."""
        return build(cls, {"rotary": Rotary(shape.head_dim), "neighbours": max(1, shape.max_seq_len // 2)} | options)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """Return two classes: the neighbours, and all earlier keys."""
        shift = self.neighbours - self.neighbours // self.group
        far, far_keys = lambda index: index // self.group + shift, lambda index: index // self.group
        return near_and_far(positions, k_positions, self.neighbours, far, far_keys)

    def extra_repr(self) -> str:
        return f"{self.rotary}, group={self.group}, neighbours={self.neighbours}"


class DualChunk(RotaryByClass):
    r"""Splits a row into chunks of s tokens. Distances are exact in a chunk and near its border, and bounded elsewhere.

    .. math:: \text{distance}(i, j) = -(j \bmod s) + \begin{cases} i \bmod s & \text{the same chunk} \\
        \min(i \bmod s + s, c) & \text{the chunk before} \\ \min(2 s - 1, c) & \text{any chunk before that}\end{cases}

    c is `chunk_size`, and s = c - `local_size`. No distance is larger than c, so a model that was trained at c tokens
    or more reads texts of any length without training (An et al. 2024, https://arxiv.org/abs/2402.17463).

    Args:
        rotary: the rotation that the model was trained with.
        chunk_size: the largest distance, three quarters of the trained length in ChunkLlama.
        local_size: the number of tokens next to the border of a chunk that have exact distances.

    Limits:
        It supports only causal attention through `attend`, without a sliding window. c is the largest distance, as in
        the authors' program and in vLLM's code for Qwen2.5-1M. In the paper the largest distance is c + 1. The scores
        that Qwen2.5-1M adds for sparse attention are not computed. It needs three rotations. Under `torch.compile`, one
        graph serves all lengths. In that graph each class is a mask over the whole row, so a CPU stores the scores of
        all pairs.

    Tested against:
        Attention in NumPy with the distance of every pair, forward and every gradient.

    >>> import locant
    >>> encoding = DualChunk(Rotary(16), chunk_size=8, local_size=2)
    >>> q, k, positions = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), Positions.arange(20)
    >>> locant.attend(*encoding.rotate(q, k, positions), k, encoding=encoding, positions=positions).shape
    torch.Size([1, 4, 20, 16])
    """

    info = EncodingInfo(
        name="dual_chunk",
        aliases=("dca", "dual_chunk_attention", "chunkllama"),
        kind="relative",
        parameters="none",
        cost_of_tokens="in every layer, three times the cost of rotary",
        cost_of_pairs="nothing",
        extrapolation="without training, to any length; distances between far chunks are bounded",
        used_by="ChunkLlama, Qwen2.5-1M",
        paper="An 2024, arXiv 2402.17463",
    )

    def __init__(self, rotary: Rotary, chunk_size: int = 3072, local_size: int = 256) -> None:
        super().__init__(rotary)
        self.chunk_size = whole("chunk_size", chunk_size, 2, remedy="chunk_size=3072")
        remedy = "use a number below chunk_size, such as local_size=256"
        self.local_size = whole("local_size", local_size, 0, self.chunk_size - 1, remedy=remedy)

    @classmethod
    def for_model(cls, shape: ModelShape, **options: Any) -> DualChunk:
        """Build the encoding with ChunkLlama's fractions of the trained length."""
        shares = {"chunk_size": max(2, shape.max_seq_len * 3 // 4), "local_size": shape.max_seq_len // 16}
        return build(cls, {"rotary": Rotary(shape.head_dim)} | shares | options)

    def classes(self, positions: Positions, k_positions: Positions | None = None) -> Sequence[PairClass]:
        """Return three classes: keys in the chunk of the query, in the chunk before, and in all earlier chunks.

        If queries and keys both count one by one, return classes for each chunk of queries, because the keys of a chunk
        are known. A compiled graph uses the three classes, because otherwise it would contain every chunk.
        """
        keys, length = positions if k_positions is None else k_positions, self.chunk_size - self.local_size
        positions.require_within(0, MAX_INT32, "DualChunk", "use positions from 0")
        by_chunk = not torch.compiler.is_compiling() and positions.seq_len > 0
        if by_chunk and positions.start is not None and keys.start is not None:
            return [*self._by_chunk(positions, positions.start, keys, keys.start)]
        largest = max(MAX_INT32 if each.max_index is None else each.max_index for each in (positions, keys))
        q_chunk, k_chunk, chunks = positions.index // length, keys.index // length, largest // length + 2
        chunk_queries, chunk_keys = (
            _chunks_as_documents(positions, q_chunk, chunks),
            _chunks_as_documents(keys, k_chunk, chunks),
        )
        earlier = replace(positions, order_or_none=q_chunk - 2, start=None)
        return [
            self._pairs(0, chunk_queries, None if k_positions is None else chunk_keys),
            self._pairs(1, chunk_queries, _chunks_as_documents(keys, k_chunk + 1, chunks), causal=False),
            self._pairs(2, earlier, replace(keys, order_or_none=k_chunk, start=None)),
        ]

    def _by_chunk(self, positions: Positions, start: int, keys: Positions, k_start: int) -> Iterator[PairClass]:
        length, end = self.chunk_size - self.local_size, start + positions.seq_len
        for begin in range(start // length * length, end, length):
            rows = slice(max(begin, start) - start, min(begin + length, end) - start)
            queries = positions.slice(rows.start, rows.stop)
            for chunks_back, (low, high) in enumerate(
                ((begin, begin + length), (begin - length, begin), (0, begin - length))
            ):
                first, last = (min(max(place - k_start, 0), keys.seq_len) for place in (low, high))
                if not chunks_back or first < last:
                    pairs = self._pairs(chunks_back, queries, keys.slice(first, last), causal=not chunks_back)
                    yield pairs._replace(rows=(rows.start, rows.stop), columns=(first, last))

    def _pairs(self, chunks_back: int, queries: Positions, keys: Positions | None, *, causal: bool = True) -> PairClass:
        """Return the pairs with a key in the query's chunk (0), in the chunk before (1), or in an earlier one (2)."""
        length, largest = self.chunk_size - self.local_size, self.chunk_size
        place = queries.index % length
        place = place if chunks_back < 2 else torch.full_like(place, length - 1)
        q_at = Positions((place + length * bool(chunks_back)).clamp(max=largest), min_index=0, max_index=largest)
        k_at = Positions((queries if keys is None else keys).index % length, min_index=0, max_index=length - 1)
        return PairClass(queries=queries, keys=keys, q_at=q_at, k_at=k_at, causal=causal)

    def extra_repr(self) -> str:
        return f"{self.rotary}, chunk_size={self.chunk_size}, local_size={self.local_size}"


def _chunks_as_documents(positions: Positions, chunk: Tensor, chunks: int) -> Positions:
    """Return positions in which every chunk of a document is a document."""
    number = torch.where(positions.document == PADDING, PADDING, positions.document * chunks + chunk)
    return replace(positions, document_or_none=number, start=None)
