"""What a GPU would be given: how often the kernel is compiled. What into, `tests/gpu_without_gpu` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rotary.rotating import launch, tables

pytest.importorskip("triton", reason="there is no Triton for this platform")


def compiled_for(arguments: dict[str, Any]) -> tuple[object, ...]:
    """What of a launch Triton compiles anew for: constants, dtypes, and what it may assume of the free integers."""
    key = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor):
            key.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif name.isupper() or isinstance(value, bool):
            key.append((name, value))
        elif name.endswith("_dim"):
            key.append((name, value == 1, value % 16 == 0))
    return tuple(key)


LENGTHS = [*range(1, 40), 63, 64, 100, 127, 128, 1000, 1023, 1024, 4095, 4096, 4099]


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_one_compilation_serves_all_lengths_and_batches(tokens_first: bool, head_dim: int) -> None:
    def queries(batch: int, heads: int, seq: int) -> Tensor:
        shape = (batch, seq, heads, head_dim) if tokens_first else (batch, heads, seq, head_dim)
        x = torch.empty(shape, dtype=torch.bfloat16)
        return x.transpose(1, 2) if tokens_first else x

    keys = {compiled_for(launch(queries(1, 8, seq), queries(1, 2, seq))) for seq in LENGTHS}
    keys |= {compiled_for(launch(queries(batch, 8, 1), queries(batch, 2, 1))) for batch in (2, 17, 256)}
    assert len(keys) == 1
    assert len(keys | {compiled_for(launch(queries(1, 8, 5).double(), queries(1, 2, 5).double()))}) == 2


def test_the_stride_of_a_single_row_says_nothing_about_alignment() -> None:
    x = torch.empty(1, 4, 5, 64, dtype=torch.bfloat16)
    odd = x.as_strided(x.shape, (7, *x.stride()[1:]))
    assert launch(odd, odd)["UNIT"] == launch(x, x)["UNIT"] == 8


def test_the_backward_and_in_place_need_no_compilation_of_their_own() -> None:
    x = torch.empty(1, 4, 5, 64)
    forward = launch(x, x)
    assert forward["direction"] == 1
    assert compiled_for(forward) == compiled_for({**forward, "direction": -1, "out_q": x, "out_k": x})


def test_few_tokens_share_out_their_heads() -> None:
    """So that a GPU is not left idle while one program rotates all heads of the newest token."""

    def shares(batch: int, seq: int) -> int:
        x = torch.empty(batch, 32, seq, 128, dtype=torch.bfloat16)
        return launch(x, x[:, :8])["shares"]

    assert shares(1, 1) == 8  # one block of four heads each
    assert shares(1, 4096) == 2
    assert shares(1, 16_384) == 1


@pytest.mark.gpu
def test_fifty_lengths_compile_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from locant.kernels.rotary import triton as module

    made: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: made.append(about))
    of = tables(44, "cuda", levels=2)
    for seq in LENGTHS:
        x = torch.randn(1, 5, seq, 44, device="cuda")
        index = torch.arange(seq, device="cuda")[None]
        module.rotate_(x, x[:, :3], x, x[:, :3], index, of, "half", seq % 2 == 0)
    assert len(made) <= 1
