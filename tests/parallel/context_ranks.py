"""What each rank of the tests of context parallelism does: the same model whole, and on its part of the tokens.

The processes are started by the tests.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from locant import (
    ALiBi,
    Cope,
    Fire,
    Fox,
    Inkling,
    Kerple,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
    T5Bias,
    XPos,
    attend,
)
from locant.parallel import attend as attend_over_ranks
from locant.parallel import gather_positions, head_slice, read_hidden_states
from locant.positions.encodings.selective_rope import SelectiveRoPE
from locant.positions.hidden_bias import HiddenBias
from locant.positions.registry import encodings
from tests.attention.allocations import allocations_of

VOCABULARY, HEADS, KV_HEADS, WIDTH, LENGTH = 31, 8, 4, 8, 24

ENCODINGS = {
    "rotary": lambda heads: Rotary(WIDTH),
    "xpos": lambda heads: XPos(WIDTH),
    "alibi": lambda heads: ALiBi(HEADS, head_slice=heads),
    "alibi learned": lambda heads: ALiBi(HEADS, learned=True, head_slice=heads),
    "t5": lambda heads: T5Bias(HEADS, num_buckets=8, max_distance=20, head_slice=heads),
    "kerple": lambda heads: Kerple(HEADS, head_slice=heads),
    "fire": lambda heads: Fire(HEADS, hidden=4, head_slice=heads),
}
READ = {
    "fox": lambda heads: Fox(HEADS, HEADS * WIDTH),
    "inkling": lambda heads: Inkling(HEADS, HEADS * WIDTH, d_rel=3, extent=9, floor=5),
}
READ |= {
    name: lambda heads, kind=kind: kind(HEADS, HEADS * WIDTH)
    for name, kind in encodings().items()
    if issubclass(kind, HiddenBias) and name not in READ
}
"""Encodings that read hidden states."""
SUMMED = {"selective_rope": lambda heads: SelectiveRoPE(WIDTH, KV_HEADS, HEADS * WIDTH, gate=True)}
"""Those that rotate by sums over earlier tokens."""
COUNTED = {"cope": lambda heads: Cope(WIDTH, 6)}
"""Those that need all keys at once."""
ROWS = {
    "one document": lambda: Positions.arange(LENGTH),
    "packed": lambda: Positions.packed([8, 16]),
    "padded": lambda: Positions.packed([8, 8], length=LENGTH),
}
METHODS = ("gather", "ring", "ulysses")


class Layer(nn.Module):
    def __init__(self, encoding: PositionEncoding) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.encoding = encoding

    def forward(self, x: Tensor, positions: Positions, over_ranks: dict[str, Any] | None, **options: Any) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            part.view(batch, seq, -1, WIDTH).transpose(1, 2)
            for part in self.qkv(x).split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], -1)
        )
        if over_ranks is None:
            positions = self.encoding.read(x, positions)
        else:
            positions = read_hidden_states(self.encoding, x, positions, k_positions=over_ranks["k_positions"])
        q, k = self.encoding.rotate(q, k, positions)
        options |= {"encoding": self.encoding, "positions": positions, "sinks": self.sinks}
        y = attend(q, k, v, **options) if over_ranks is None else attend_over_ranks(q, k, v, **over_ranks, **options)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """A layer between a table and a head, drawn alike on every rank."""

    def __init__(self, name: str, heads: slice | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.layer = Layer((ENCODINGS | READ | SUMMED | COUNTED)[name](heads))
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY)

    def loss(self, ids: Tensor, targets: Tensor, positions: Positions, count: int, **options: Any) -> Tensor:
        """Summed over the real tokens here, divided by those of all ranks."""
        x = self.layer(self.table(ids), positions, **options)
        real = positions.document.expand(len(ids), -1) >= 0
        return F.cross_entropy(self.head(x)[real], targets[real], reduction="sum") / count


@functools.cache
def alone(name: str, row: str, window: int | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    whole, positions = Net(name).double(), ROWS[row]()
    loss = whole.loss(*tokens(), positions, real_tokens(row), over_ranks=None, window=window)
    loss.backward()
    return float(loss.detach()), {name: required(x.grad) for name, x in whole.named_parameters()}


def tokens() -> tuple[Tensor, Tensor]:
    """Ids and targets."""
    ids, targets = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(5))
    return ids, targets


def real_tokens(row: str) -> int:
    return 2 * int((ROWS[row]().document >= 0).sum())


def required(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def distances(name: str, row: str, method: str, window: int | None, zigzag: bool) -> tuple[float, float]:
    """How far, relatively, loss and gradients over the ranks are from those of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected, gradients = alone(name, row, window)
    has_slice = method == "ulysses" and not zigzag  # an encoding may be made whole, or for the heads of a rank
    model = Net(name, head_slice(HEADS) if has_slice else None).double()
    ids, targets = tokens()
    slots, mine = ROWS[row]().shard_slots(rank, world, zigzag), ROWS[row]().shard(rank, world, zigzag)
    over_ranks = {"method": method, "k_positions": gather_positions(mine)}
    loss = model.loss(
        ids[:, slots], targets[:, slots], mine, real_tokens(row), over_ranks=over_ranks, window=window
    )  # fmt: skip
    loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    worst = 0.0
    for label, parameter in model.named_parameters():
        wanted, grad = gradients[label], required(parameter.grad)
        dist.all_gather(parts := [torch.empty_like(grad) for _ in range(world)], grad)
        split = [i for i, (here, whole) in enumerate(zip(grad.shape, wanted.shape, strict=True)) if here != whole]
        found = torch.cat(parts, split[0]) if split else torch.stack(parts).sum(0)  # heads of this rank, or a sum
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return abs(float(total) - expected) / expected, worst


EVERY_ROW = [
    (name, row, method, (None, 7)[(i + j + k) % 2], (i + j + k) % 4 > 0)
    for (i, name), (j, method), (k, row) in itertools.product(enumerate(ENCODINGS), enumerate(METHODS), enumerate(ROWS))
]
"""Every encoding with every method and kind of row; with windows and without zigzag in turns."""
OF_HIDDEN = [
    (name, row, method, None, zigzag)
    for name, method in itertools.product(READ, METHODS[:2])
    for row, zigzag in (("one document", True), ("packed", True), ("padded", False))
]
OF_SUMS = [("selective_rope", row, method, None, row != "padded") for row, method in zip(ROWS, METHODS, strict=True)]
OF_COUNTS = [("cope", row, method, None, True) for row, method in itertools.product(ROWS, ("gather", "ulysses"))]
SOME_CASES = EVERY_ROW[::7] + OF_HIDDEN[::5] + OF_SUMS + OF_COUNTS[2:4]  # 7 and 3 are coprime: every method comes
EVERY_ROW += OF_HIDDEN + OF_SUMS + OF_COUNTS


def peak_bytes(method: str, group: dist.ProcessGroup | None = None) -> int:
    """The most that one rank holds in forward and backward attention over a row of 4 096 tokens."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = Positions.after(rank * 4096 // world, 4096 // world)  # contiguous: no tiles, whose size is the same for all
    everyone = gather_positions(mine, group=group)
    q, k, v = (torch.randn(1, 2, mine.seq_len, 64, requires_grad=True) for _ in range(3))

    def run() -> None:
        options = {"method": method, "positions": mine, "k_positions": everyone, "encoding": ALiBi(2)}
        attend_over_ranks(q, k, v, group=group, **options).sum().backward()

    return allocations_of(run).peak


def has_bits_of_one_process(row: str, zigzag: bool) -> bool:
    """Whether rotations by running sums have, on this rank, the bits that they have in the whole row."""
    torch.manual_seed(3)
    encoding = SelectiveRoPE(WIDTH, KV_HEADS, HEADS * WIDTH, gate=True, offset=True)
    x, q = torch.randn(2, LENGTH, HEADS * WIDTH), torch.randn(2, HEADS, LENGTH, WIDTH)
    shard = dist.get_rank(), dist.get_world_size(), zigzag
    slots = ROWS[row]().shard_slots(*shard)
    with torch.no_grad():
        whole = encoding.rotate_one(q, encoding.read(x, ROWS[row]()))
        mine = read_hidden_states(encoding, x[:, slots], ROWS[row]().shard(*shard))
        real = mine.document[0] >= 0
        return torch.equal(encoding.rotate_one(q[:, :, slots], mine)[:, :, real], whole[:, :, slots][:, :, real])


def find_out(cases: list[tuple[Any, ...]]) -> dict[str, Any]:
    found: dict[str, Any] = {"/".join(map(str, case)): distances(*case) for case in cases}
    if dist.get_world_size() == 4:
        groups = {2: dist.new_subgroups(2)[0], 4: None}
        found |= {f"{method}/{n}": peak_bytes(method, group) for method in METHODS[:2] for n, group in groups.items()}
    found["bits"] = [has_bits_of_one_process(row, zigzag) for row in ROWS for zigzag in (False, True)]
    try:
        gather_positions(Positions.arange(4))
    except RangeError as error:
        found["one token on all ranks"] = str(error)
    try:
        gather_positions(Positions.after(10 * dist.get_rank(), 4 + dist.get_rank() % 2))
    except ShapeError as error:
        found["shards of two sizes"] = str(error)
    return found
