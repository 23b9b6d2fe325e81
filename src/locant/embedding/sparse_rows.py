"""Train a large table by the rows that a batch reads: sparse gradients, an optimizer, and rows that are read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.arguments import Real, real
from locant.embedding.table import Table
from locant.embedding.table_file import TableFile
from locant.errors import LocantError, ShapeError

T = TypeVar("T")


class SparseTable(Table):
    """A table whose gradient has only the rows that were read. The ids may be on another device than the rows.

    The gradient of a row is summed in float32 and rounded once.
    """

    def read(
        self, ids: Int[Tensor, "*batch"], weight: Float[Tensor, "num_rows width"], padding_idx: int | None = None
    ) -> Float[Tensor, "*batch width"]:
        if hasattr(weight, "placements"):
            got = "got a SparseTable for a table that is split over ranks, whose gradient is dense on each rank"
            raise LocantError(got, "keep the table that VocabularyParallel sets, or do not split this table")
        unique, places = torch.unique(ids.to(weight.device), return_inverse=True)
        rows = F.embedding(unique, weight, padding_idx, sparse=True).to(ids.device)
        wide = rows if rows.dtype == torch.float64 else rows.float()
        return F.embedding(places.to(ids.device), wide).to(weight.dtype)

    def read_present(
        self, ids: Int[Tensor, "*batch"], weight: Float[Tensor, "num_rows width"]
    ) -> Float[Tensor, "*batch width"]:
        """Return the row of every id, and zeros for -1. Padding reads no row, so no row is trained because of it."""
        is_present = ids >= 0
        if bool(is_present.all()):
            return self.read(ids, weight)
        rows = self.read(ids[is_present], weight)
        return rows.new_zeros(*ids.shape, rows.shape[-1]).index_put((is_present,), rows)


def require_file_fits(file: TableFile, num_rows: int, width: int, weight: Tensor) -> None:
    """Raise an error unless the file has these rows, and the table that it replaces is not split over ranks."""
    if file.weight.shape[0] < num_rows or file.weight.shape[1] != width:
        got = f"got {file} for {num_rows} rows of width {width}"
        raise ShapeError(got, f"TableFile.create(path, num_rows={num_rows}, width={width})")
    if hasattr(weight, "placements"):
        got = f"got {file} for a table that is split over ranks, but one process at a time can train a file"
        raise LocantError(got, "use the file without VocabularyParallel, or split a table in memory")


class RowAdagrad(torch.optim.Optimizer):
    r"""Adagrad with one number for each row (as in DLRM): it reads and writes only the rows that have a gradient.

    With the gradient g of a row of width d, its state s and its weight w:

    .. math:: s \leftarrow s + |g|^2 / d, \qquad w \leftarrow w - lr \cdot g / (\sqrt{s} + eps)

    A step is computed in float32, and rows of 16 bits are rounded once.

    Args:
        params: parameters with sparse gradients, such as ``embedding.parameters()``.
        lr: the learning rate.
        eps: a number that is added to the root.
        file: the `TableFile` of the only parameter. It then holds the state, too, and `state_dict` is empty.

    >>> from locant.embedding import NGramEmbedding, NGramHash
    >>> hashing = NGramHash.of(orders=(2,), heads=1, size=1_000, vocab_size=50)
    >>> embedding = NGramEmbedding(hashing, 4)
    >>> embedding.table = SparseTable()
    >>> optimizer = RowAdagrad(embedding.parameters(), lr=0.1)
    >>> embedding(torch.tensor([[3, 4, 3]])).sum().backward()
    >>> optimizer.step()
    >>> int((optimizer.state[embedding.weight]["sum_of_squares"] > 0).sum())
    3
    """

    def __init__(self, params: Any, lr: Real = 0.01, *, eps: Real = 1e-10, file: TableFile | None = None) -> None:
        lr = real("lr", lr, low=0, remedy="lr=0.01")
        super().__init__(params, {"lr": lr, "eps": real("eps", eps, low=0, remedy="eps=1e-10")})
        self.file = file
        weights = [parameter for group in self.param_groups for parameter in group["params"]]
        if file is not None and (len(weights) != 1 or weights[0].data_ptr() != file.weight.data_ptr()):
            got = f"got {len(weights)} parameters for {file}, expected its weight alone"
            raise LocantError(got, "embedding.use_file(file), and RowAdagrad([embedding.weight], file=file)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each row with its bits. `torch.optim.Optimizer` would cast it to the dtype of the rows."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, weights, strict=True):
            if (entry := state_dict["state"].get(number)) is not None:
                exact = entry["sum_of_squares"].to(parameter.device, torch.float32, copy=True)
                self.state[parameter]["sum_of_squares"] = exact

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the rows that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"], group["eps"])
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, lr: float, eps: float) -> None:
        if not gradient.is_sparse:
            got = f"got a dense gradient of {tuple(gradient.shape)}, expected one of the rows that were read"
            raise LocantError(got, "embedding.table = locant.embedding.SparseTable()")
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values().float()
        if self.file is not None:
            self.file.save_rows(rows)
            state = self.file.state
        else:
            entry = self.state[parameter]
            if not entry:
                entry["sum_of_squares"] = torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device)
            state = cast(Tensor, entry["sum_of_squares"])
        squares = state[rows] + values.square().mean(1)
        state[rows] = squares
        change = values * (lr / (squares.sqrt() + eps))[:, None]
        parameter[rows] = (parameter[rows].float() - change).to(parameter.dtype)


def read_ahead(batches: Iterable[T], file: TableFile, rows_of: Callable[[T], Int[Tensor, "*batch"]]) -> Iterator[T]:
    """Yield batches, while a thread brings the rows of the next batch from the disk into memory.

    The thread only reads. So the model computes the same bits as without it, also if a step changes rows of the next
    batch.

    Args:
        batches: any iterable. It is read one batch ahead.
        file: the table.
        rows_of: returns the rows that a batch reads, such as ``lambda batch: embedding.rows_of(batch["ids"])``.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="locant-rows") as pool:
        waiting: T | None = None
        is_first, fetched = True, None
        for batch in batches:
            task = pool.submit(_fetch, file, rows_of, batch)
            if not is_first:
                yield cast(T, waiting)
            if fetched is not None:
                fetched.result()  # an error of the thread is raised here
            waiting, fetched, is_first = batch, task, False
        if fetched is not None:
            fetched.result()
            yield cast(T, waiting)


def _fetch(file: TableFile, rows_of: Callable[[Any], Tensor], batch: Any) -> None:
    with torch.no_grad():
        rows = rows_of(batch).flatten().cpu().unique()
        rows = rows[rows >= 0]
        file.advise(rows)
        file.weight.index_select(0, rows)  # torch holds no lock of Python while the system reads
