"""Embed a text with random tables or a model's tables, and record the facts of each stage: ids, windows, vectors."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from locant.deprecation import Renamed
from locant.embedding.input import InputEmbedding
from locant.embedding.table import TableSize, table_sizes
from locant.embedding.token import Scale
from locant.errors import InputError, RangeError
from locant.files import replace_file, require_apart
from locant.positions import PositionEncoding, Positions
from locant.positions.angles import Angles
from locant.positions.base import ModelShape
from locant.positions.documents import PADDING
from locant.positions.registry import find, name_of
from locant.text import IGNORED_TARGET, Windows
from locant.text.corpus import Corpus

NUM_FIRST = 8
NUM_VALUES = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options for cutting and embedding a text. `batch` is the number of embedded windows, ``None`` for all.

    `model` is the folder of a published model. Its tables and encoding are used instead of the sizes here.
    """

    encoding: str
    d_model: int
    num_heads: int
    context: int
    stride: int | None = None
    batch: int | None
    seed: int
    scale: Scale | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        by_head = {"head_dim", "num_heads"} & {*find(self.encoding).sizes()}
        if by_head and self.d_model % self.num_heads:
            nearest = max(1, self.d_model // self.num_heads) * self.num_heads
            got = f"got d_model={self.d_model} for {self.num_heads} heads, expected a multiple"
            raise RangeError(got, f"use a d_model of {nearest}")

    @property
    def shape(self) -> ModelShape:
        return ModelShape(d_model=self.d_model, num_heads=self.num_heads, max_seq_len=self.context)


@dataclass(frozen=True, kw_only=True)
class Token:
    """One of the first tokens, with the first `values` of its embedding."""

    text: str
    id: int
    position: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the embedding, and its size."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    bytes: dict[str, int]
    """The bytes of the table, by dtype."""

    @classmethod
    def of(cls, size: TableSize) -> Table:
        name = {"token.weight": "token", "encoding.weight": "position"}.get(size.name, size.name)
        return cls(name=name, shape=size.shape, parameters=size.num_parameters, bytes=size.bytes_by_dtype())


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The facts of every stage. Shapes are for the embedded windows, and for the positions of one window.

    `cos_sin`, which rotate queries and keys, have the axes positions and pairs. The `bias` of scores has the axes
    heads, queries and keys.
    """

    source: str
    characters: int
    tokens: int
    vocab_size: int
    fingerprint: str
    encoding: str
    methods: tuple[str, ...]
    windows: int
    embedded_windows: int
    context: int
    stride: int
    padding: int
    ids: tuple[int, ...]
    token_vectors: tuple[int, ...]
    position_vectors: tuple[int, ...] | None
    embeddings: tuple[int, ...]
    cos_sin: tuple[int, ...] | None
    bias: tuple[int, ...] | None
    tables: tuple[Table, ...]
    first: tuple[Token, ...]
    seed: int
    model: str | None

    doors = Renamed("methods")

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for JSON, with ``None`` instead of NaN, which JSON does not have."""
        first = [
            {**asdict(token), "values": [value if math.isfinite(value) else None for value in token.values]}
            for token in self.first
        ]
        return {**asdict(self), "first": first}


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """The tensors of a written file.

    Targets are -100 at the end of a text. Padding has targets -100, positions -1 and ids 0.
    """

    ids: Int[Tensor, "windows context"]
    targets: Int[Tensor, "windows context"]
    positions: Int[Tensor, "windows context"]
    embeddings: Float[Tensor, "windows context d_model"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingResult:
    """The vectors, and the facts about each stage."""

    flow: Flow
    vectors: Vectors


@torch.no_grad()
def embed(corpus: Corpus, plan: Plan) -> EmbeddingResult:
    """Cut a text into windows, and embed the first `plan.batch` windows, or all of them."""
    end = corpus.tokenizer.vocab_size  # an id that no token has, which is the target of a text's last token
    # No window reaches from one file into the next, and every token has a target.
    offsets = np.array(corpus.documents)
    text, documents = np.insert(corpus.ids.astype(np.int64), offsets[1:], end), offsets + np.arange(len(offsets))
    windows = Windows(text, plan.context, plan.stride, mode="document", documents=documents)
    count = len(windows) if plan.batch is None else min(plan.batch, len(windows))
    embedding, encoding = _embedding(plan, end)
    batch = windows.__getitems__(range(count))
    ids, targets, positions = batch["ids"], batch["targets"], batch["positions"]
    vectors = Vectors(
        ids=ids,
        targets=targets.masked_fill(targets == end, IGNORED_TARGET),
        positions=torch.where(positions.document == PADDING, -1, positions.index).expand_as(ids).contiguous(),
        embeddings=embedding(ids, positions),
    )
    return EmbeddingResult(flow=_flow(corpus, plan, windows, embedding, encoding, vectors, positions), vectors=vectors)


def _embedding(plan: Plan, entries: int) -> tuple[InputEmbedding, PositionEncoding]:
    """Return random tables for this number of entries, or the tables of the plan's model, and the encoding."""
    if plan.model is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            encoding = find(plan.encoding).for_model(plan.shape)
            added = encoding if "embed" in encoding.methods() else None
            return InputEmbedding(entries, plan.d_model, encoding=added, scale=plan.scale).eval(), encoding.eval()
    embedding = InputEmbedding.from_pretrained(plan.model)
    if entries > (rows := embedding.token.vocab_size):
        got = f"got a tokenizer of {entries} entries for the {rows} rows of {plan.model}"
        raise InputError(got, "pass the tokenizer of this model")
    return embedding, embedding.encoding


def save_vectors(embedded: EmbeddingResult, path: Path | str) -> None:
    """Write ids, targets, positions and embeddings atomically, with the facts as metadata."""
    require_vectors_place(path, embedded.flow.model)
    facts = {name: json.dumps(value) for name, value in embedded.flow.to_dict().items() if name != "first"}
    with replace_file(path) as temporary:
        try:
            save_file(vars(embedded.vectors), temporary, metadata=facts)
        except SafetensorError as error:
            raise InputError(f"cannot write {path}: {error}", "write to a disk with more free space") from None


def require_vectors_place(path: Path | str, model: str | None = None) -> None:
    """Raise an error unless the name ends in the format's suffix and the file is not one of the model's files."""
    if Path(path).suffix != ".safetensors":
        name = str(Path(path).with_suffix(".safetensors")) if Path(path).name else "out.safetensors"
        raise InputError(f"got {str(path)!r}, expected a name ending in .safetensors", f"use {name}")
    if model is not None and Path(model).is_dir():
        require_apart(Path(path), Path(model))


def _flow(
    corpus: Corpus, plan: Plan, windows: Windows, embedding: InputEmbedding, encoding: PositionEncoding,
    vectors: Vectors, positions: Positions,
) -> Flow:  # fmt: skip
    ids, x, shape = vectors.ids, vectors.embeddings, plan.shape
    methods = encoding.methods()
    tables = embedding
    if encoding is not embedding.encoding:
        tables = nn.ModuleDict({"token": embedding.token, "encoding": encoding})
    angles = getattr(encoding, "angles", None) if "rotate" in methods else None
    k = torch.zeros(1, shape.num_heads, shape.max_seq_len, shape.head_dim)
    bias = encoding.bias(k[:, :, :1], k, Positions.arange(1), Positions.arange(shape.max_seq_len))  # of one query
    first: list[Token] = []
    for row, column in (vectors.positions >= 0).nonzero().tolist()[:NUM_FIRST]:
        token, position = int(ids[row, column]), int(vectors.positions[row, column])
        values = tuple(x[row, column, :NUM_VALUES].tolist())
        first.append(Token(text=corpus.tokenizer.token(token), id=token, position=position, values=values))
    adds = tuple(x.shape) if positions.batch > 1 else tuple(x.shape[1:])
    return Flow(
        source=corpus.name,
        characters=corpus.characters,
        tokens=len(corpus.ids),
        vocab_size=corpus.tokenizer.vocab_size,
        fingerprint=corpus.tokenizer.fingerprint,
        encoding=name_of(plan.encoding) if plan.model is None else type(encoding).info.name,
        methods=methods,
        windows=len(windows),
        embedded_windows=len(ids),
        context=windows.length,
        stride=windows.stride,
        padding=int((vectors.positions < 0).sum()),
        ids=tuple(ids.shape),
        token_vectors=(*ids.shape, embedding.token.d_model),
        position_vectors=adds if "embed" in methods else None,
        embeddings=tuple(x.shape),
        cos_sin=(plan.context, len(angles.frequencies)) if isinstance(angles, Angles) else None,
        bias=None if bias is None else (shape.num_heads, shape.max_seq_len, bias.shape[3]),
        tables=tuple(map(Table.of, table_sizes(tables))),
        first=tuple(first),
        seed=plan.seed,
        model=plan.model,
    )
