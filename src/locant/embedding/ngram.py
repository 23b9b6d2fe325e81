"""Embeddings of hashed n-grams: a large table that is read at rows which the last few token ids decide.

Engram (https://arxiv.org/abs/2601.07372, DeepSeek-V4.1), the per-layer embedding of Qwen4, the n-gram embedding of
LongCat (https://arxiv.org/abs/2601.21204) and the hashed bytes of BLT (https://arxiv.org/abs/2412.09871) are this
table with other numbers. `ngram_hash` states the hash. What a model does with the rows afterwards is in `NGramGate`.

The rows of a batch are known from its ids alone, before the model runs: see `NGramEmbedding.rows_of`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.arguments import MAX_WIDTH, Real, one_of, real, shape_error, short_repr, whole
from locant.embedding.look_back import TokenHistory, look_back, resolve_documents
from locant.embedding.ngram_hash import NGramHash
from locant.embedding.sparse_rows import SparseTable, require_file_fits
from locant.embedding.table import Ids, Table, ids_on_device, require_ids
from locant.embedding.table_file import TableFile
from locant.errors import InputError, RangeError, ShapeError
from locant.positions.documents import PADDING
from locant.positions.positions import OptionalPositions

if TYPE_CHECKING:
    from locant.models.ngram_tables import NGramTable

Combine = Literal["concat", "sum"]


class NGramEmbedding(nn.Module):
    """Look up the rows of the hashed n-grams that end with each token, and concatenate or add them.

    An n-gram does not cross a document, and padding is not a part of it: padding between two tokens does not separate
    them, as in attention. Padding itself has zeros, and reads no row that gets a gradient.

    Args:
        hashing: the hash, which decides the columns and the number of rows. See `NGramHash`.
        width: the width of a row.
        combine: ``"concat"``: the output has the width ``columns x width``. ``"sum"``: it has `width`, and columns are
            added in their order.
        num_rows: the number of rows of the table, if it is padded. Default: what the hash needs.
        init_std: standard deviation of new rows. Default: ``width ** -0.5``.
        token_map: an array with the number of each token id that is hashed instead of the id, so that tokens of one
            meaning share it (Engram). `fill` and `end` of the hash are such numbers, too.

    >>> hashing = NGramHash.of(orders=(2, 3), heads=4, size=1_000, vocab_size=50_257)
    >>> embedding = NGramEmbedding(hashing, 16)
    >>> embedding(torch.tensor([[464, 3290, 318]])).shape
    torch.Size([1, 3, 128])
    """

    def __init__(
        self,
        hashing: NGramHash,
        width: int,
        *,
        combine: Combine = "concat",
        num_rows: int | None = None,
        init_std: Real | None = None,
        token_map: Tensor | np.ndarray | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(hashing, NGramHash):
            got = f"got {short_repr(hashing)} for hashing, expected an NGramHash"
            raise RangeError(got, "pass NGramHash.of(orders=(2, 3), heads=8, size=1_000_000, vocab_size=...)")
        self.hashing = hashing
        one_of("combine", combine, ("concat", "sum"))
        self.combine: Combine = combine
        width = whole("width", width, 1, MAX_WIDTH, remedy="width=128")
        rows = hashing.num_rows if num_rows is None else whole(
            "num_rows", num_rows, hashing.num_rows, 2**48, remedy=f"num_rows={hashing.num_rows}"
        )  # fmt: skip
        std = width**-0.5 if init_std is None else init_std
        self.init_std = real("init_std", std, low=0, remedy="init_std=0.02, or None for width ** -0.5")
        self.token_map: Tensor | None
        self.register_buffer(
            "token_map", None if token_map is None else _check_token_map(token_map, hashing.vocab_size)
        )
        self.table = Table()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    @classmethod
    def from_config(
        cls, config: Any, index: int = 0, *, token_map: Tensor | np.ndarray | None = None
    ) -> NGramEmbedding:
        """Return the untrained table of a published model, from its Hugging Face configuration.

        Published tables have up to 100 GB. Call this inside ``torch.device("meta")`` to allocate no memory.

        Args:
            config: a configuration object or the dictionary of a ``config.json``: Qwen4, BLT, Engram (DeepSeek-V4.1)
                or LongCat.
            index: which table, if several layers have one.
            token_map: for Engram, the compressed number of each token id, as `compressed_ids` returns.

        Raises:
            InputError: the model has no such table, or the configuration lacks a key.

        >>> blt = {"model_type": "blt", "encoder_hash_byte_group_vocab": 1_000, "encoder_hash_byte_group_size": [3, 4],
        ...        "encoder_config": {"hidden_size": 8, "vocab_size": 260}}
        >>> NGramEmbedding.from_config(blt)
        NGramEmbedding(2000 x 8, 2 columns of orders 3, 4, combine='sum')
        """
        from locant.models.ngram_tables import ngram_tables, table_at

        return cls._from_table(table_at(ngram_tables(config), index), token_map)

    @classmethod
    def _from_table(cls, table: NGramTable, token_map: Tensor | np.ndarray | None) -> NGramEmbedding:
        if table.pad_id is not None and token_map is None:
            numbers = table.hashing.vocab_size
            got = f"got no token_map for a model that maps its ids to {numbers} numbers and hashes those"
            raise InputError(
                got, "token_map=locant.embedding.compressed_ids(tokenizer), with the tokenizer of the model"
            )
        return cls(
            table.hash_for(token_map), table.width, combine=table.combine,
            num_rows=table.num_rows, init_std=table.init_std, token_map=token_map,
        )  # fmt: skip

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        index: int = 0,
        *,
        dtype: torch.dtype | str | None = None,
        token_map: Tensor | np.ndarray | None = None,
    ) -> NGramEmbedding:
        """Load the `index`-th n-gram table of a published model.

        A table that one tensor holds is mapped into memory: a row is read from disk when it is used. A table in several
        tensors is joined in memory.

        Raises:
            InputError: there is no such model or table, or the tensors do not match the configuration.

        >>> NGramEmbedding.from_pretrained("Qwen4-Exp")  # doctest: +SKIP
        """
        from locant.checkpoints.pretrained_ngrams import read_pretrained_ngrams

        table, weight = read_pretrained_ngrams(folder, index, dtype)
        with torch.device("meta"):
            embedding = cls._from_table(table, token_map)
        embedding.weight = nn.Parameter(weight)
        if token_map is not None:
            embedding.token_map = _check_token_map(token_map, embedding.hashing.vocab_size)
        return embedding.eval()

    def use_file(self, file: TableFile) -> None:
        """Read the rows from a file that is mapped into memory, with gradients of only the rows that were read.

        Build the module on the meta device if its table does not fit into memory. Train it with
        ``RowAdagrad([embedding.weight], file=file)``, and leave the weight out of other checkpoints.
        """
        require_file_fits(file, self.hashing.num_rows, self.width, self.weight)
        self.weight = nn.Parameter(file.weight, requires_grad=self.weight.requires_grad)
        self.table = SparseTable()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.initialize(self.weight, lambda rows: rows.normal_(std=self.init_std), None)

    def accept_ids(self, vocab_size: int) -> None:
        """Accept ids up to `vocab_size`. The hash of old ids and the table do not change."""
        vocab_size = whole("vocab_size", vocab_size, 1, remedy="use the new number of tokens")
        if vocab_size > self.hashing.vocab_size:
            self.hashing = dataclasses.replace(self.hashing, vocab_size=vocab_size)

    @property
    def width(self) -> int:
        """The width of a row."""
        return self.weight.shape[1]

    @property
    def output_width(self) -> int:
        return self.width * (self.hashing.num_columns if self.combine == "concat" else 1)

    def forward(
        self, ids: Ids, positions: OptionalPositions = None, *, history: TokenHistory | None = None
    ) -> Float[Tensor, "batch seq output_width"]:
        """Return the rows of the n-grams that end with each token.

        Args:
            ids: the token ids, ``batch seq``, or ``seq`` for one row.
            positions: their positions. Default: every row is one document, or continues `history`.
            history: the tokens before these ones, for decoding. They are added to it. `TokenHistory.truncate` removes
                draft tokens, and `TokenHistory.reorder` selects beams.

        Raises:
            RangeError: an id is not in the vocabulary. A GPU does not check this, and any id has a row.
            LocantError: tokens before these ones are known to be missing, and there is no history.
        """
        rows = self.rows_of(ids, positions, history=history)
        columns = self.read(rows)
        return self._add(None, columns) if self.combine == "sum" else columns.flatten(-2)

    def add_to(
        self,
        x: Float[Tensor, "batch seq output_width"],
        ids: Ids,
        positions: OptionalPositions = None,
        *,
        history: TokenHistory | None = None,
    ) -> Float[Tensor, "batch seq output_width"]:
        """Add the embeddings to `x`, column by column as BLT does. Adding their sum would round differently."""
        if x.shape[-1] != self.output_width:
            raise shape_error("x", x, f"a last dimension of {self.output_width}", "use the width of the model")
        if self.combine == "concat":
            return x + self(ids, positions, history=history)
        return self._add(x, self.read(self.rows_of(ids, positions, history=history)))

    def rows_of(
        self, ids: Ids, positions: OptionalPositions = None, *, history: TokenHistory | None = None
    ) -> Int[Tensor, "batch seq columns"]:
        """Return the rows of the table that `forward` reads for each token, and -1 for padding.

        They depend only on the ids, so the rows of the next batch can be fetched while the model computes.
        """
        ids = ids_on_device(ids, self)
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2:
            raise shape_error("ids", ids, "(batch, seq), or (seq,) for one row", "ids.flatten(1)")
        document = resolve_documents(
            ids, positions, history, "ids", "NGramEmbedding", matter=self.hashing.max_order > 1
        )
        # no id reads outside of the table, so a GPU does not wait for the check
        ids = require_ids(ids, self._num_ids, "NGramEmbedding", "vocab_size", ids.device, look=not ids.is_cuda)
        tokens = ids if self.token_map is None else self.token_map.to(ids.device)[ids.clamp(0, self._num_ids - 1)]
        shifts = range(1, self.hashing.max_order)
        seen, exists = look_back(tokens, document, shifts, end=self.hashing.end, history=history)
        earlier = [x.masked_fill(~present, self.hashing.fill) for x, present in zip(seen, exists, strict=True)]
        rows = self.hashing.rows(torch.stack([tokens, *earlier], -1))
        return rows if document is None else rows.masked_fill((document == PADDING)[..., None], -1)

    def read(self, rows: Int[Tensor, "batch seq columns"]) -> Float[Tensor, "batch seq columns width"]:
        """Return these rows of the table, and zeros for -1."""
        return self.table.read_present(rows, self.weight)

    @property
    def _num_ids(self) -> int:
        return self.hashing.vocab_size if self.token_map is None else len(self.token_map)

    def _add(self, x: Tensor | None, columns: Tensor) -> Tensor:
        for column in columns.unbind(-2):
            x = column if x is None else x + column
        return columns.sum(-2) if x is None else x

    def extra_repr(self) -> str:
        orders = ", ".join(map(str, dict.fromkeys(self.hashing.orders)))
        rows, width = self.weight.shape
        return f"{rows} x {width}, {self.hashing.num_columns} columns of orders {orders}, combine={self.combine!r}"


def compressed_ids(tokenizer: Any) -> np.ndarray:
    """Return the number of each token id in Engram: tokens that differ only in case, accents or spaces share one.

    Args:
        tokenizer: a fast tokenizer of `transformers`, or a ``tokenizers.Tokenizer``.

    The text of each token is normalized (NFKC, no accents, lower case, one space for white space, no space at the
    ends), and numbers follow the first occurrence. Tokens that are a part of a character keep their own number.

    >>> from tokenizers import Tokenizer, decoders, models
    >>> tokenizer = Tokenizer(models.WordLevel({"the": 0, " The": 1, "cat": 2, " ": 3}, unk_token="the"))
    >>> tokenizer.decoder = decoders.Fuse()
    >>> compressed_ids(tokenizer).tolist()
    [0, 0, 1, 2]
    """
    from tokenizers import Regex, normalizers

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not callable(getattr(backend, "id_to_token", None)):
        got = f"got a {type(tokenizer).__name__}, expected a fast tokenizer of transformers or of tokenizers"
        raise InputError(got, "transformers.AutoTokenizer.from_pretrained(folder)")
    single = "\ue000"  # a space alone would be stripped
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), single),
            normalizers.Strip(), normalizers.Replace(single, " "),
        ]
    )  # fmt: skip
    numbers = dict[str, int]()
    size = len(tokenizer) if backend is not tokenizer else backend.get_vocab_size()
    keys = (_compressed_text(backend, normalizer, number) for number in range(size))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _compressed_text(backend: Any, normalizer: Any, number: int) -> str:
    text = backend.decode([number], skip_special_tokens=False)
    return backend.id_to_token(number) if "\ufffd" in text else normalizer.normalize_str(text) or text


def _check_token_map(token_map: Tensor | np.ndarray, vocab_size: int) -> Int[Tensor, " ids"]:
    if not isinstance(token_map, Tensor | np.ndarray) or (
        isinstance(token_map, np.ndarray) and token_map.dtype.kind not in "iub"
    ):
        got = f"got {short_repr(token_map)} for token_map, expected an array with one integer for each id"
        raise ShapeError(got, "pass compressed_ids(tokenizer)")
    # the values are read here, although the module may be built on the meta device
    numbers = token_map if isinstance(token_map, Tensor) else torch.from_numpy(np.array(token_map))
    if numbers.ndim != 1 or numbers.is_floating_point() or numbers.dtype == torch.bool or not len(numbers):
        raise ShapeError(
            f"got a token_map of shape {tuple(numbers.shape)}, expected one integer for each id", "map[id]"
        )
    if numbers.device.type != "meta":
        low, high = (int(each) for each in numbers.aminmax())
        if low < 0 or high >= vocab_size:
            got = f"got {low if low < 0 else high} in token_map, expected numbers below {vocab_size}"
            raise RangeError(got, "use the map and the hash of one model")
    return numbers.long()
