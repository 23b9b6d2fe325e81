"""What flows from text to embeddings: the ids, windows and vectors of a text, and the facts about every stage.

Nothing is trained: the tables hold the random numbers a model would start with, so the vectors show what is added to
what, in which shape, not what words mean.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from locant.embedding import InputEmbedding, table_sizes
from locant.embedding.token import Scale
from locant.errors import InputError, RangeError
from locant.files import replacing
from locant.positions import PositionEncoding, Positions
from locant.positions.angles import Angles
from locant.positions.catalog import ModelShape, find
from locant.positions.documents import PADDING
from locant.text import Windows
from locant.text.corpus import Corpus

__all__ = ["Embedded", "Flow", "Plan", "Token", "Vectors", "embed", "require_vectors_name", "save_vectors"]

NUM_FIRST = 8
NUM_VALUES = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with a text. `batch` windows are embedded; ``None`` for all there are."""

    encoding: str = "learned"
    d_model: int = 256
    num_heads: int = 4
    context: int = 4
    stride: int | None = None
    batch: int | None = 8
    seed: int = 0
    scale: Scale | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "num_heads", "context"):
            if getattr(self, name) < 1:
                raise RangeError(
                    f"got {name}={getattr(self, name)}, expected 1 or more", f"{name}={getattr(Plan, name)}"
                )
        if self.batch is not None and self.batch < 1:
            raise RangeError(f"got batch={self.batch}, expected 1 or more", f"batch={Plan.batch}")
        by_head = {"head_dim", "num_heads"} & {*find(self.encoding).sizes}
        if by_head and self.d_model % self.num_heads:
            nearest = max(1, self.d_model // self.num_heads) * self.num_heads
            raise RangeError(
                f"got d_model={self.d_model} for {self.num_heads} heads, expected a multiple", f"a d_model of {nearest}"
            )

    @property
    def shape(self) -> ModelShape:
        return ModelShape(d_model=self.d_model, num_heads=self.num_heads, max_seq_len=self.context)


@dataclass(frozen=True, kw_only=True)
class Token:
    """One of the first tokens; `values` are the first of its embedding."""

    text: str
    id: int
    position: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the embedding, and what it takes."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    bytes_fp32: int
    bytes_bf16: int


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The facts of every stage; shapes are those of the windows that were embedded."""

    source: str
    characters: int
    tokens: int
    vocab_size: int
    fingerprint: str
    encoding: str
    doors: tuple[str, ...]
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

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """What is written to a file. `targets` are -100, and `positions` -1, where a window is filled up."""

    ids: Int[Tensor, "windows context"]
    targets: Int[Tensor, "windows context"]
    positions: Int[Tensor, "windows context"]
    embeddings: Float[Tensor, "windows context d_model"]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The vectors, and the facts about them."""

    flow: Flow
    vectors: Vectors


@torch.no_grad()
def embed(source: Corpus, plan: Plan) -> Embedded:
    """Cut a text into windows, and turn the first of them (or all) into vectors."""
    windows = _windows(source, plan)
    count = len(windows) if plan.batch is None else min(plan.batch, len(windows))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        encoding = find(plan.encoding).for_model(plan.shape)
        embedding = InputEmbedding(
            source.tokenizer.vocab_size, plan.d_model, encoding=encoding, scale=plan.scale
        ).eval()
    batch = windows.__getitems__(list(range(count)))
    ids, positions = batch["ids"], batch["positions"]
    x = embedding(ids, positions)
    place = torch.where(positions.document == PADDING, -1, positions.index).expand_as(ids).contiguous()
    vectors = Vectors(ids=ids, targets=batch["targets"], positions=place, embeddings=x)
    return Embedded(flow=_flow(source, plan, windows, embedding, vectors, positions), vectors=vectors)


def save_vectors(embedded: Embedded, path: Path | str) -> None:
    """Write ids, targets, positions and embeddings, with the facts as metadata; whole, or not at all."""
    require_vectors_name(path)
    facts = {name: json.dumps(value) for name, value in embedded.flow.to_dict().items() if name != "first"}
    with replacing(path) as temporary:
        try:
            save_file(vars(embedded.vectors), temporary, metadata=facts)
        except SafetensorError as error:
            raise InputError(f"cannot write {path}: {error}", "a place with more room") from None


def require_vectors_name(path: Path | str) -> None:
    """Raise unless the name says what will be in the file."""
    if Path(path).suffix != ".safetensors":
        remedy = str(Path(path).with_suffix(".safetensors")) if Path(path).name else "out.safetensors"
        raise InputError(f"got {str(path)!r}, expected a name ending in .safetensors", remedy)


def _windows(source: Corpus, plan: Plan) -> Windows:
    """No window reaches from one file into the next."""
    if len(source.documents) > 2:
        return Windows(source.ids, plan.context, plan.stride, mode="document", documents=source.documents)
    return Windows(source.ids, plan.context, plan.stride)


def _flow(
    source: Corpus, plan: Plan, windows: Windows, embedding: InputEmbedding, vectors: Vectors, positions: Positions
) -> Flow:
    ids, x = vectors.ids, vectors.embeddings
    entry = find(plan.encoding)
    adds = tuple(x.shape) if positions.batch > 1 else tuple(x.shape[1:])
    return Flow(
        source=source.name,
        characters=source.characters,
        tokens=len(source.ids),
        vocab_size=source.tokenizer.vocab_size,
        fingerprint=source.tokenizer.fingerprint,
        encoding=plan.encoding,
        doors=entry.doors,
        windows=len(windows),
        embedded_windows=len(ids),
        context=windows.length,
        stride=windows.stride,
        padding=int((vectors.positions < 0).sum()),
        ids=tuple(ids.shape),
        token_vectors=(*ids.shape, plan.d_model),
        position_vectors=adds if "embed" in entry.doors else None,
        embeddings=tuple(x.shape),
        cos_sin=_cos_sin_shape(embedding.encoding, plan.context),
        bias=_bias_shape(embedding.encoding, plan.shape),
        tables=tuple(_tables(embedding)),
        first=tuple(_first(source, vectors)),
        seed=plan.seed,
    )


def _cos_sin_shape(encoding: PositionEncoding, context: int) -> tuple[int, ...] | None:
    """What the rotate door turns a window by: positions, pairs."""
    angles = getattr(encoding, "angles", None)
    turns = type(encoding).rotate is not PositionEncoding.rotate
    return (context, len(angles.frequencies)) if turns and isinstance(angles, Angles) else None


def _bias_shape(encoding: PositionEncoding, shape: ModelShape) -> tuple[int, ...] | None:
    """What the bias door gives a window: heads, queries, keys; one query is asked for, and as many are told."""
    k = torch.zeros(1, shape.num_heads, shape.max_seq_len, shape.head_dim)
    bias = encoding.bias(k[:, :, :1], k, Positions.arange(1), Positions.arange(shape.max_seq_len))
    return None if bias is None else (shape.num_heads, shape.max_seq_len, bias.shape[3])


def _tables(embedding: InputEmbedding) -> list[Table]:
    return [
        Table(
            name={"token.weight": "token", "encoding.weight": "position"}.get(size.name, size.name),
            shape=size.shape,
            parameters=size.num_parameters,
            bytes_fp32=size.num_bytes(torch.float32),
            bytes_bf16=size.num_bytes(torch.bfloat16),
        )
        for size in table_sizes(embedding)
    ]


def _first(source: Corpus, vectors: Vectors) -> list[Token]:
    """The first tokens of the first windows, in reading order."""
    places = [(row, column) for row, column in (vectors.positions >= 0).nonzero().tolist()][:NUM_FIRST]
    return [
        Token(
            text=source.tokenizer.token(int(vectors.ids[place])),
            id=int(vectors.ids[place]),
            position=int(vectors.positions[place]),
            values=tuple(vectors.embeddings[place][:NUM_VALUES].tolist()),
        )
        for place in places
    ]
