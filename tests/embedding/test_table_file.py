"""Tables in files: rows are trained in place, and a killed process returns to the exact bits of a checkpoint."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from locant import InputError, LocantError, NGramEmbedding, Positions, RangeError, ShapeError
from locant.embedding import NGramHash, RowAdagrad, SparseTable, TableFile, read_ahead
from tests.refusal import refuses

HASHING = NGramHash.of(orders=(2, 3), heads=2, size=40, vocab_size=30)
ROWS = HASHING.num_rows


def batch(step: int) -> Tensor:
    return torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(step))


def train(embedding: NGramEmbedding, optimizer: RowAdagrad, step: int) -> None:
    out = embedding(batch(step), Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])))
    optimizer.zero_grad()
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(out)).sum().backward()
    optimizer.step()


def on_file(path: Path, step: int | None = None) -> tuple[TableFile, NGramEmbedding, RowAdagrad]:
    file = TableFile.open(path, step)
    with torch.device("meta"):
        embedding = NGramEmbedding(HASHING, 5)
    embedding.use_file(file)
    return file, embedding, RowAdagrad([embedding.weight], lr=0.1, file=file)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    table = tmp_path / "table.safetensors"
    TableFile.create(table, num_rows=ROWS, width=5, dtype=request.param, std=0.1, seed=1).close()
    return table


def test_a_file_is_trained_like_a_table_in_memory(path: Path) -> None:
    """The reference is the formula with dense gradients, in which rows without a gradient do not change."""
    file, embedding, optimizer = on_file(path)
    weight, state = load_file(path)["weight"].clone(), torch.zeros(ROWS)
    for step in range(5):
        train(embedding, optimizer, step)
        dense = copy.deepcopy(NGramEmbedding(HASHING, 5)).to(weight.dtype)
        dense.weight = torch.nn.Parameter(weight.clone())
        out = dense(batch(step), Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])))
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(out)).sum().backward()
        gradient = dense.weight.grad.float()
        state = state + gradient.square().mean(1)
        change = gradient * (0.1 / (state.sqrt() + 1e-10))[:, None]
        weight = (weight.float() - change.nan_to_num(0)).to(weight.dtype)
        assert torch.equal(file.weight, weight)
        assert torch.equal(file.state, state)
    file.close()
    assert torch.equal(load_file(path)["weight"], weight)


def test_only_rows_that_were_read_have_a_gradient(path: Path) -> None:
    _, embedding, _ = on_file(path)
    positions = Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]))
    embedding(batch(0), positions).sum().backward()
    read = embedding.rows_of(batch(0), positions)
    assert torch.equal(embedding.weight.grad.coalesce().indices()[0], read[read >= 0].unique())
    assert embedding.weight.grad.is_sparse


@given(st.data())
def test_every_checkpoint_returns_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    table = tmp_path_factory.mktemp("table") / "table.safetensors"
    TableFile.create(table, num_rows=ROWS, width=5, std=0.1).close()
    saved, last = {0: load_file(table)}, 0
    for _ in range(data.draw(st.integers(1, 4))):
        back = data.draw(st.sampled_from(sorted(saved)))
        file, embedding, optimizer = on_file(table, back)
        for name, found in (("weight", file.weight), ("sum_of_squares", file.state)):
            assert torch.equal(found, saved[back][name])
        saved = {step: each for step, each in saved.items() if step <= back}
        last = back
        for action in data.draw(st.lists(st.sampled_from(["train", "train", "checkpoint", "forget"]), max_size=6)):
            if action == "train":
                last += 1
                train(embedding, optimizer, last)
            elif action == "checkpoint" and last not in saved:
                file.checkpoint(last)
                saved[last] = load_file(table)
            elif action == "forget":
                file.forget(last)
                saved = {step: each for step, each in saved.items() if step >= last or step == max(saved)}
        assert file.steps == sorted(saved)
        file.close()  # whatever was trained since the last checkpoint stays in the file


WORKER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.embedding.test_table_file import on_file, train
file, embedding, optimizer = on_file(Path({path!r}))
for step in range(1, 9):
    if step == {killed_at}:
        real = optimizer.file.save_rows
        def save_rows(rows):
            real(rows)
            file.weight[rows[:1]] = 7.0  # a step that wrote a part of its rows
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.file.save_rows = save_rows
    train(embedding, optimizer, step)
    if step in (2, 5):
        file.checkpoint(step)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [1, 4, 7])
def test_a_killed_process_resumes_with_the_same_bits(path: Path, killed_at: int) -> None:
    other = path.with_name("other.safetensors")
    shutil.copy(path, other)
    shutil.copytree(f"{path}.undo", f"{other}.undo")
    file, embedding, optimizer = on_file(other)
    for step in range(1, 9):
        train(embedding, optimizer, step)
    code = WORKER.format(root=str(Path(__file__).parents[2]), path=str(path), killed_at=killed_at)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    resumed, embedding, optimizer = on_file(path)
    assert resumed.steps[-1] == max(step for step in (0, 2, 5) if step < killed_at)
    for step in range(resumed.steps[-1] + 1, 9):
        train(embedding, optimizer, step)
    assert torch.equal(resumed.weight, file.weight)
    assert torch.equal(resumed.state, file.state)


def test_a_record_that_was_cut_off_is_ignored(path: Path) -> None:
    """The process was killed while it wrote the record, so the rows had not been changed yet."""
    file, embedding, optimizer = on_file(path)
    before = file.weight.clone()
    train(embedding, optimizer, 1)
    file.close()
    undo = Path(f"{path}.undo") / "undo-000000000000"
    content = undo.read_bytes()
    undo.write_bytes(content + content[:-3])
    file, _, _ = on_file(path)
    assert torch.equal(file.weight, before)


def test_a_record_whose_numbers_were_not_written_is_ignored(path: Path) -> None:
    """After a loss of power, the end of a file may hold any bytes."""
    undo = Path(f"{path}.undo") / "undo-000000000000"
    for end in (b"\xff" * 100, b"\0" * 100, b"\0\0\0\0" + b"\xff" * 8):
        file, embedding, optimizer = on_file(path)
        before = file.weight.clone()
        train(embedding, optimizer, 1)
        file.close()
        undo.write_bytes(undo.read_bytes() + end)
        file, _, _ = on_file(path)
        assert torch.equal(file.weight, before)
        file.close()


def test_batches_that_are_read_ahead_are_the_same_batches(path: Path) -> None:
    file, embedding, optimizer = on_file(path)
    threads, batches = set[int](), [batch(step) for step in range(4)]

    def rows_of(ids: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return embedding.rows_of(ids)

    found = list(read_ahead(iter(batches), file, rows_of))
    assert all(torch.equal(*pair) for pair in zip(found, batches, strict=True))
    assert threading.get_ident() not in threads
    assert list(read_ahead([], file, rows_of)) == []
    with pytest.raises(RangeError, match="vocab_size=30"):
        list(read_ahead([batches[0], torch.full((1, 3), 30)], file, rows_of))
    del optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_another_device_or_in_memory_are_trained_too(dtype: torch.dtype) -> None:
    """The state of rows of 16 bits has 32 bits, also after it was loaded."""
    embedding = NGramEmbedding(HASHING, 5).to(dtype)
    embedding.table = SparseTable()
    optimizer = RowAdagrad(embedding.parameters(), lr=0.1)
    before = embedding.weight.detach().clone()
    train(embedding, optimizer, 0)
    again = NGramEmbedding(HASHING, 5)
    again.table, again.weight = SparseTable(), torch.nn.Parameter(embedding.weight.detach().clone())
    restored = RowAdagrad(again.parameters(), lr=0.1)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for module, its in ((embedding, optimizer), (again, restored)):
        train(module, its, 1)
        train(module, its, 2)
    assert torch.equal(embedding.weight, again.weight)
    sums = [its.state[module.weight]["sum_of_squares"] for module, its in ((embedding, optimizer), (again, restored))]
    assert torch.equal(*sums)
    assert sums[1].dtype == torch.float32
    assert not torch.equal(embedding.weight, before)
    rows = SparseTable().read_present(torch.tensor([[3, -1]]), before)
    assert torch.equal(rows[0], torch.stack([before[3], torch.zeros(5, dtype=dtype)]))
    assert torch.equal(rows[0, 0], F.embedding(torch.tensor(3), before))


def test_what_cannot_work_is_an_error(path: Path, tmp_path: Path) -> None:
    file, embedding, optimizer = on_file(path)
    with refuses(InputError, "open already"):
        TableFile.open(path)
    with refuses(RangeError, "after the checkpoint of step 0"):
        file.checkpoint(0)
    file.close()
    train_now = lambda: train(embedding, optimizer, 1)  # noqa: E731
    with refuses(RangeError, "closed"):
        train_now()
    with refuses(RangeError, "a checkpoint to write in a table that is closed"):
        file.checkpoint(1)
    with refuses(RangeError, "checkpoints to remove in a table that is closed"):
        file.forget(1)
    with refuses(InputError, "cannot write", "free space"):
        TableFile.create(tmp_path / "huge.safetensors", num_rows=2**40, width=2**16)
    assert not [*tmp_path.glob("*huge*"), *tmp_path.glob(".*huge*")]
    with refuses(InputError, "can return to the steps 0"):
        TableFile.open(path, 3)
    with refuses(InputError, "exists"):
        TableFile.create(path, num_rows=4, width=4)
    TableFile.create(tmp_path / "small.safetensors", num_rows=3, width=5).close()
    with refuses(ShapeError, f"num_rows={ROWS}"):
        embedding.use_file(TableFile.open(tmp_path / "small.safetensors"))
    shutil.rmtree(f"{tmp_path / 'small.safetensors'}.undo")
    with refuses(InputError, "without the folder of its undo files"):
        TableFile.open(tmp_path / "small.safetensors")
    (Path(f"{path}.undo") / "undo-000000000000").unlink()
    with refuses(InputError, "without undo files", "copy the files of"):
        TableFile.open(path)
    (tmp_path / "bad.safetensors").write_bytes(b"12")
    with refuses(InputError, "not an intact safetensors file"):
        TableFile.open(tmp_path / "bad.safetensors")
    dense = NGramEmbedding(HASHING, 5)
    dense(batch(0)).sum().backward()
    with refuses(LocantError, "dense gradient", "SparseTable"):
        RowAdagrad(dense.parameters()).step()
    with refuses(LocantError, "expected its weight alone"):
        RowAdagrad(dense.parameters(), file=file)
