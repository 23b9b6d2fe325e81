r"""Per-layer embeddings (Gemma 3n, Gemma 4): each token has a small vector for each layer, in a second table.

With the row r of a token, which has a part for each layer, and its embedding x of width d at the input, the part of a
layer is

.. math:: p = \frac{1}{\sqrt{2}} \bigl(norm(W x / \sqrt{d}) + \sqrt{width} \, r\bigr)

and the layer adds this to its hidden state h, after attention and the MLP:

.. math:: norm(P \, (\phi(G h) \odot p))

Norms are root mean squares. All parts are known before the first layer runs, so the table may stay in host memory or in
a file. EmbeddingGemma 2 has no table, and its part is only the norm of the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, entries, flag, one_of, real, shape_error, whole
from locant.embedding.deferred_errors import DeferredErrorModule
from locant.embedding.sparse_rows import SparseTable, require_file_fits
from locant.embedding.table import Ids, Table, as_int64, ids_on_device, rows_of
from locant.embedding.table_file import TableFile
from locant.embedding.token import factor_of, round_factor
from locant.errors import InputError, RangeError, ShapeError
from locant.spelling import dtype_name
from locant.tensors import require_tensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "silu": F.silu, "relu": F.relu,
}  # fmt: skip
"""The activations of a gate, by their names in `transformers`."""


class PerLayerEmbedding(DeferredErrorModule):
    """Give every layer its part of a token: a row of a second table plus a projection of the token embedding.

    Args:
        vocab_size: number of rows of the table, or ``None`` without a table (EmbeddingGemma 2).
        num_layers: number of layers.
        width: width of the part of one layer. A row has ``num_layers * width`` numbers.
        d_model: width of the token embedding.
        padding_idx: a row that does not get a gradient.
        placeholder_ids: ids that read the padding row instead of their own, such as those of images in Gemma 4.
        outside_row: the row of ids that the table does not have, as in Gemma 3n. Default: they are an error.
        rounded_factors: round the factors of the projection and of the sum to the dtype of the token embedding, as
            Gemma 3n does. This matters only in 16 bits.
        eps: the epsilon of the norm.
        init_std: standard deviation of new rows. Default: ``width ** -0.5``, so that both terms have the same size.

    >>> embedding = PerLayerEmbedding(1_000, num_layers=4, width=8, d_model=32)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> embedding(ids, torch.randn(1, 3, 32)).shape
    torch.Size([1, 3, 4, 8])
    """

    def __init__(
        self,
        vocab_size: int | None,
        num_layers: int,
        width: int,
        d_model: int,
        *,
        padding_idx: int | None = None,
        placeholder_ids: Sequence[int] = (),
        outside_row: int | None = None,
        rounded_factors: bool = False,
        eps: Real = 1e-6,
        init_std: Real | None = None,
    ) -> None:
        super().__init__()
        rows = None if vocab_size is None else whole("vocab_size", vocab_size, 1, remedy="use the model's vocab_size")
        self.num_layers = whole("num_layers", num_layers, 1, MAX_WIDTH, remedy="pass the number of layers")
        self.width = whole("width", width, 1, MAX_WIDTH, remedy="width=256")
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the model")
        self.padding_idx = _row("padding_idx", padding_idx, rows)
        self.outside_row = _row("outside_row", outside_row, rows)
        remedy = "placeholder_ids=(258_880,)"
        ids = entries("placeholder_ids", placeholder_ids, remedy)
        self.placeholder_ids = tuple(whole("an id in placeholder_ids", each, 0, remedy=remedy) for each in ids)
        if self.placeholder_ids and self.padding_idx is None:
            raise RangeError("got placeholder_ids without padding_idx, the row that they read", "padding_idx=0")
        self.rounded_factors = flag("rounded_factors", rounded_factors)
        self.eps = float(real("eps", eps, low=0, remedy="eps=1e-6"))
        std = self.width**-0.5 if init_std is None else init_std
        self.init_std = real("init_std", std, low=0, remedy="init_std=0.02, or None for width ** -0.5")
        self.table = Table()
        parts = self.num_layers * self.width
        self.weight = None if rows is None else nn.Parameter(torch.empty(rows, parts))
        self.projection = nn.Linear(self.d_model, parts, bias=False)
        self.norm = nn.Parameter(torch.ones(self.width))
        self._reset_table()

    @classmethod
    def from_config(cls, config: Any) -> PerLayerEmbedding:
        """Return the untrained per-layer embedding of Gemma 3n, Gemma 4 or EmbeddingGemma 2.

        The table of Gemma 3n has 2 billion numbers. Call this inside ``torch.device("meta")`` to allocate no memory.

        Args:
            config: a configuration object or the dictionary of a ``config.json``. The whole configuration of a
                multimodal Gemma 4 has the ids of its placeholders, and its text part does not.

        Raises:
            InputError: the model has no per-layer embedding, or the configuration lacks a key.

        >>> gemma = {"model_type": "gemma3n_text", "num_hidden_layers": 30, "hidden_size": 2048}
        >>> with torch.device("meta"):
        ...     PerLayerEmbedding.from_config(gemma).weight.shape
        torch.Size([262144, 7680])
        """
        from locant.models.per_layer_tables import require_per_layer_table

        return cls(**require_per_layer_table(config).embedding_options)

    @classmethod
    def from_pretrained(cls, folder: Path | str, *, dtype: torch.dtype | str | None = None) -> PerLayerEmbedding:
        """Load the per-layer embedding of a published model.

        The table is mapped into memory: a row is read from disk when it is used. A table in a GGUF file is dequantised
        to float32 in memory. Arguments and errors are the same as for `TokenEmbedding.from_pretrained`.

        >>> PerLayerEmbedding.from_pretrained("gemma-3n-E2B")  # doctest: +SKIP
        """
        from locant.checkpoints.pretrained import read_pretrained_per_layer

        pretrained = read_pretrained_per_layer(folder, dtype)
        with torch.device("meta"):
            embedding = cls(**pretrained.options)
        embedding.load_state_dict(pretrained.tensors, assign=True)
        return embedding.eval()

    def use_file(self, file: TableFile) -> None:
        """Read the rows from a file that is mapped into memory, with gradients of only the rows that were read.

        Build the module on the meta device if its table does not fit into memory. Train it with
        ``RowAdagrad([embedding.weight], file=file)``, and leave the weight out of other checkpoints.
        """
        weight = self._require_table()
        require_file_fits(file, weight.shape[0], weight.shape[1], weight)
        self.weight = nn.Parameter(file.weight, requires_grad=weight.requires_grad)
        self.table = SparseTable()

    def reset_parameters(self) -> None:
        self._reset_table()
        self.projection.reset_parameters()
        nn.init.ones_(self.norm)

    def _reset_table(self) -> None:
        if self.weight is not None:
            with torch.no_grad():
                self.table.initialize(self.weight, lambda rows: rows.normal_(std=self.init_std), self.padding_idx)

    def resize(self, vocab_size: int) -> None:
        """Append rows to the table, so that it has at least `vocab_size` rows. Old rows are kept byte for byte.

        Without `outside_row`, new rows are initialized as usual. With it, they begin as copies of that row, which their
        ids have read so far, so no output changes. Afterwards the weight is a new parameter in memory, so build the
        optimizer after resizing. Without a table nothing changes.
        """
        vocab_size = whole("vocab_size", vocab_size, 1, remedy="use the new number of tokens")
        if self.weight is None or vocab_size <= (has := self.weight.shape[0]):
            return
        with torch.no_grad():
            weight = self.table.extended_copy(self.weight, vocab_size)
            if self.outside_row is None:
                weight[has:].normal_(std=self.init_std)
            else:
                weight[has:] = weight[self.outside_row]
            self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)

    def forward(
        self, ids: Ids | None, hidden: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch seq num_layers width"]:
        """Return the part of every layer. Layer i takes ``parts[:, :, i]``, and `PerLayerGate` uses it.

        Args:
            ids: the token ids, ``batch seq``, or ``seq`` for one row. ``None`` for embeddings without ids: their parts
                are only the norm of the projection.
            hidden: the embeddings that enter the first layer.

        Raises:
            RangeError: an id has no row. On a GPU a later call or `raise_deferred_errors` raises it.
            ShapeError: the shapes or dtypes do not fit.
        """
        require_tensor("hidden", hidden)
        if hidden.ndim != 3 or hidden.shape[-1] != self.d_model:
            raise shape_error("hidden", hidden, f"(batch, seq, {self.d_model})", "pass the token embedding of the ids")
        dtype = self.projection.weight.dtype
        if hidden.dtype != dtype and not torch.is_autocast_enabled(hidden.device.type):
            got = f"got embeddings of dtype {dtype_name(hidden.dtype)}, the projection is {dtype_name(dtype)}"
            raise ShapeError(got, f"hidden.to({dtype}), or torch.autocast")
        projected = self.projection(hidden) * self._factor(self.d_model**-0.5, hidden.dtype)
        projected = _rms_norm(projected.unflatten(-1, (self.num_layers, self.width)), self.norm, self.eps)
        if ids is None or self.weight is None:
            return projected
        rows = self.rows(ids)
        if rows.shape[:-1] != hidden.shape[:-1]:
            got = f"got ids for {tuple(rows.shape[:-1])} and embeddings for {tuple(hidden.shape[:-1])} tokens"
            raise ShapeError(got, "pass the ids of these embeddings")
        rows = rows.to(hidden.device).unflatten(-1, (self.num_layers, self.width))
        return (projected + rows) * self._factor(2**-0.5, hidden.dtype)

    def rows(self, ids: Ids) -> Float[Tensor, "batch seq parts"]:
        """Return the scaled row of every id, with the parts of all layers after each other.

        The table is read on its own device, which may be another one than the model's.
        """
        weight = self._require_table()
        ids = as_int64(ids_on_device(ids, self), "PerLayerEmbedding")
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2:
            raise shape_error("ids", ids, "(batch, seq), or (seq,) for one row", "ids.flatten(1)")
        for each in self.placeholder_ids:
            ids = ids.masked_fill(ids == each, self.padding_idx or 0)
        if self.outside_row is not None:
            ids = ids.masked_fill((ids < 0) | (ids >= weight.shape[0]), self.outside_row)
        rows = rows_of(
            ids.to(weight.device), weight, "PerLayerEmbedding", "vocab_size", self._deferred_errors, self.padding_idx,
            read=self.table.read,
        )  # fmt: skip
        return rows * factor_of("sqrt_d_model_rounded", self.width, weight.dtype)

    def _factor(self, factor: float, dtype: torch.dtype) -> float:
        return round_factor(factor, dtype) if self.rounded_factors else factor

    def _require_table(self) -> Tensor:
        if self.weight is None:
            got = "got a per-layer embedding without a table"
            raise InputError(got, "call it with ids=None, or pass vocab_size")
        return self.weight

    def extra_repr(self) -> str:
        rows = "without a table" if self.weight is None else f"vocab_size={self.weight.shape[0]}"
        return f"{rows}, num_layers={self.num_layers}, width={self.width}, d_model={self.d_model}"


class PerLayerGate(nn.Module):
    """Return what a layer adds to its hidden state: its part of the token, gated by the hidden state and projected.

    Gemma 4 adds the result to the hidden state. Gemma 3n takes its first stream (AltUp) as the hidden state, and adds
    the result to the other streams.

    Args:
        d_model: width of the hidden state.
        width: width of the part of one layer.
        activation: the name of the activation: ``"gelu_pytorch_tanh"``, ``"gelu"``, ``"silu"`` or ``"relu"``.
        eps: the epsilon of the norm.

    >>> gate = PerLayerGate(32, 8)
    >>> hidden, part = torch.randn(1, 3, 32), torch.randn(1, 3, 8)
    >>> gate(hidden, part).shape
    torch.Size([1, 3, 32])
    """

    def __init__(self, d_model: int, width: int, *, activation: str = "gelu_pytorch_tanh", eps: Real = 1e-6) -> None:
        super().__init__()
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the model")
        self.width = whole("width", width, 1, MAX_WIDTH, remedy="width=256")
        self.activation = one_of("activation", activation, ACTIVATIONS)
        self.eps = float(real("eps", eps, low=0, remedy="eps=1e-6"))
        self.gate = nn.Linear(self.d_model, self.width, bias=False)
        self.projection = nn.Linear(self.width, self.d_model, bias=False)
        self.norm = nn.Parameter(torch.ones(self.d_model))

    @classmethod
    def from_config(cls, config: Any) -> PerLayerGate:
        """Return an untrained gate. All layers of a model have the same sizes.

        Raises:
            InputError: the model has no per-layer embedding.

        >>> PerLayerGate.from_config({"model_type": "gemma4_text", "num_hidden_layers": 35, "hidden_size": 1536})
        PerLayerGate(
          d_model=1536, width=256, activation='gelu_pytorch_tanh'
          (gate): Linear(in_features=1536, out_features=256, bias=False)
          (projection): Linear(in_features=256, out_features=1536, bias=False)
        )
        """
        from locant.models.per_layer_tables import require_per_layer_table

        return cls(**require_per_layer_table(config).gate_options)

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, layer: int = 0, *, dtype: torch.dtype | str | None = None
    ) -> PerLayerGate:
        """Load the gate of a layer of a published model.

        >>> PerLayerGate.from_pretrained("gemma-3n-E2B", layer=3)  # doctest: +SKIP
        """
        from locant.checkpoints.pretrained import read_pretrained_per_layer_gate

        pretrained = read_pretrained_per_layer_gate(folder, layer, dtype)
        with torch.device("meta"):
            gate = cls(**pretrained.options)
        gate.load_state_dict(pretrained.tensors, assign=True)
        return gate.eval()

    def forward(
        self, hidden: Float[Tensor, "batch seq d_model"], part: Float[Tensor, "batch seq width"]
    ) -> Float[Tensor, "batch seq d_model"]:
        """Return what the layer adds.

        Args:
            hidden: the hidden state after the MLP.
            part: the layer's part, ``parts[:, :, layer]`` of `PerLayerEmbedding`.
        """
        require_tensor("hidden", hidden)
        require_tensor("part", part)
        if hidden.shape[-1:] != (self.d_model,):
            raise shape_error("hidden", hidden, f"a last dimension of {self.d_model}", "use the model's hidden state")
        if part.shape != (expected := (*hidden.shape[:-1], self.width)):
            raise shape_error("part", part, str(expected), "pass the part of one layer, parts[:, :, layer]")
        gated = ACTIVATIONS[self.activation](self.gate(hidden)) * part
        return _rms_norm(self.projection(gated), self.norm, self.eps)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, width={self.width}, activation={self.activation!r}"


def _row(name: str, row: int | None, num_rows: int | None) -> int | None:
    """Return the index of a row, or ``None``."""
    if row is None:
        return None
    if num_rows is None:
        raise RangeError(f"got {name} without a table", f"{name}=None, or pass vocab_size")
    return whole(name, row, -num_rows, num_rows - 1, remedy=f"pass None, or one of the {num_rows} rows") % num_rows


def _rms_norm(
    x: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*batch width"]:
    """Divide by the root mean square in float32 or more, and multiply there, too."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)  # another function has other bits
    return (wide * weight.to(wide.dtype)).type_as(x)
