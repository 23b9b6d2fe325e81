"""What does the input of BERT cost in one pass, beside its modules one after another, compiled or not, and a copy?

On a CPU; on a GPU the modules are called. It refuses to report where a contender's result is another. Beside busy
processes the first line is the copy: as many bytes as rows are read and results written forward. On a CPU that has
nothing else to do, the plain modules come first.

    PYTHONPATH=src python -m benchmarks input_embedding
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import BUSY, Row, busy_processes, measure
from locant import InputEmbedding, Learned

__all__ = ["rows"]

VOCAB, LENGTH, WIDTH = 30_522, 512, 768
BATCH = 32
DTYPES = (torch.float32, torch.bfloat16)
CASES = [*((dtype, dropout) for dtype in DTYPES for dropout in (0.0, 0.1)), (torch.float16, 0.0)]
NEAR = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-2}
COPY, OURS, PLAIN = "copy of the result into existing memory", "locant, in one pass", "the plain modules"


def rows() -> list[Row]:
    """Forward alone, and forward and backward, with dropout and without; on a CPU also beside busy processes."""
    found = []
    for dtype, dropout in CASES:
        case = _BertInput(dtype, dropout)
        found += case.rows() + case.rows_beside_others()
    return found


class _BertInput:
    """Ids, segments and a gradient, and everybody who embeds them."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        torch.manual_seed(0)
        torch.compiler.reset()  # torch compiles a module for 8 dtypes and modes, and then runs it as it is
        self.ids = torch.randint(VOCAB, (BATCH, LENGTH))
        self.segments = torch.randint(2, (BATCH, LENGTH))
        self.gradient = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
        self.words = f"BERT's input, {BATCH} x {LENGTH} tokens of {WIDTH}, {dtype}, dropout {dropout}"
        fused = InputEmbedding(
            VOCAB, WIDTH, encoding=Learned(LENGTH, WIDTH), num_segments=2, norm=nn.LayerNorm(WIDTH, eps=1e-12),
            dropout=dropout, padding_idx=0, backend="fused",
        ).to(dtype)  # fmt: skip
        plain = copy.deepcopy(fused)
        plain.backend = "plain"
        compiled = copy.deepcopy(plain)
        self.modules: dict[str, nn.Module] = {PLAIN: plain, OURS: fused}
        self.calls: dict[str, Callable[[], Tensor]] = {
            PLAIN: lambda: plain(self.ids, None, self.segments),
            OURS: lambda: fused(self.ids, None, self.segments),
        }
        self._add("torch.compile of the plain modules", compiled, torch.compile(compiled, fullgraph=True))
        if importlib.util.find_spec("transformers") is not None:
            self._add_bert(fused, dropout, dtype)

    def _add(self, name: str, module: nn.Module, call: Callable[..., Tensor]) -> None:
        self.modules[name] = module
        self.calls[name] = lambda: call(self.ids, None, self.segments)

    def _add_bert(self, ours: InputEmbedding, dropout: float, dtype: torch.dtype) -> None:
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertEmbeddings

        theirs = BertEmbeddings(BertConfig(hidden_dropout_prob=dropout)).to(dtype)
        names = {"token": "word_embeddings", "encoding": "position_embeddings", "segment": "token_type_embeddings",
                 "norm": "LayerNorm"}  # fmt: skip
        state = {f"{names[k.split('.')[0]]}.{k.split('.')[1]}": v for k, v in ours.state_dict().items()}
        theirs.load_state_dict(state, strict=False)
        self.modules["transformers, BertEmbeddings"] = theirs
        self.calls["transformers, BertEmbeddings"] = lambda: theirs(self.ids, token_type_ids=self.segments)

    def rows(self) -> list[Row]:
        self._require_equal()
        return self._measured("", list(self.calls))

    def rows_beside_others(self) -> list[Row]:
        """Of two contenders only: each run takes several times as long."""
        with busy_processes():
            return self._measured(f" beside {BUSY} busy processes", [PLAIN, OURS])

    def _measured(self, where: str, names: list[str]) -> list[Row]:
        into = torch.empty_like(self.gradient)
        limit: dict[str, Callable[[], object]] = {COPY: lambda: into.copy_(self.gradient)}
        first = limit if where else {}
        forward = first | {name: self.calls[name] for name in names} | limit
        both = first | {name: self._trained(name) for name in names} | limit
        return [
            *measure(f"forward{where}, {self.words}", forward, rounds=7),
            *measure(f"forward and backward{where}, {self.words}{self.wanted(where)}", both, rounds=7),
        ]

    def wanted(self, where: str) -> str:
        """What was aimed at, in words."""
        of_plain = 0.5 if self.gradient.dtype == torch.float32 else 0.77
        return f" (wanted: {'4 of the copy' if where else f'{of_plain} of the plain modules'})"

    def _trained(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.modules[name].zero_grad(set_to_none=True)
            self.calls[name]().backward(self.gradient)

        return run

    @torch.no_grad()
    def _require_equal(self) -> None:
        """Without dropout, everybody's result is the same; or there is nothing to report."""
        for module in self.modules.values():
            module.eval()
        expected = self.calls["the plain modules"]().float()
        for name, call in self.calls.items():
            off = float((call().float() - expected).abs().max())
            assert off < NEAR[self.gradient.dtype], f"{name} is off by {off:.2g}: nothing is reported"
        for module in self.modules.values():
            module.train()
