"""The bugs of `benchmarks.real_models.bugs` do what they say: tiny random models beside formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.real_models.bugs import BUGS, DOCUMENTS, GAP, IGNORED, SCENARIOS, Bug, tf32
from benchmarks.real_models.cost_of_bugs import losses, packed_windows, windows
from tests.known_bugs.figures import README, table_under
from tests.tolerances import LOGITS

BASE, WIDTH, LENGTH = 100_000.0, 16, 32
LOCAL, GLOBAL = 10_000.0, 1_000_000.0
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": WIDTH,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def gemma(layer_types: list[str] = KINDS, window: int = 5, local: float = LOCAL, full: float = GLOBAL) -> Any:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=3, head_dim=WIDTH,
            num_attention_heads=4, num_key_value_heads=1, sliding_window=window, layer_types=layer_types,
            query_pre_attn_scalar=WIDTH, max_position_embeddings=64, initializer_range=0.5,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": full},
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        )
    ).eval()  # fmt: skip


def ids(count: int = LENGTH) -> Tensor:
    return torch.randint(1, 61, (1, count), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def hidden(model: Any, bug: Bug | None = None, **call: Any) -> Tensor:
    call = call or {"input_ids": ids()}
    with (bug or SCENARIOS["text"].correct).spoil(model):
        return model.get_decoder()(**call, use_cache=False).last_hidden_state


def frequencies(base: float = BASE, width: int = WIDTH) -> np.ndarray:
    return base ** (-2 * np.arange(WIDTH // 2) / width)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Keep the eight leading binary digits, of halves the even one."""
    exponent = np.floor(np.log2(np.where(x == 0, 1, np.abs(x))))
    step = 2.0 ** (exponent - 7)
    return np.round(x / step) * step


POSITIONS = np.array([0, 1, 2, 255, 257, 1000, 2049, 4097, 8191])[:, None].astype(np.float64)
ANGLES: dict[str, np.ndarray] = {
    "exact-angles": POSITIONS * frequencies(),
    "frequencies-bfloat16": POSITIONS * bfloat16(frequencies()),
    "frequencies-float16": POSITIONS * frequencies().astype(np.float16).astype(np.float64),
    "positions-bfloat16": bfloat16(POSITIONS) * frequencies(),
    "positions-float16": POSITIONS.astype(np.float16).astype(np.float64) * frequencies(),
    "product-bfloat16": bfloat16(bfloat16(POSITIONS) * bfloat16(frequencies())),
    "product-float16": (POSITIONS.astype(np.float16) * frequencies().astype(np.float16)).astype(np.float64),
    "base-10000": POSITIONS * frequencies(1e4),
    "base-times-10": POSITIONS * frequencies(10 * BASE),
    "linear-unasked": POSITIONS / 4 * frequencies(),
    "rotated-twice": 2 * POSITIONS * frequencies(),
    "not-rotated": 0 * POSITIONS * frequencies(),
    "direction-reversed": -POSITIONS * frequencies(),
    "pairs-not-rotated": POSITIONS * frequencies() * (np.arange(WIDTH // 2) < WIDTH // 4),
    "frequencies-of-twice-the-width": POSITIONS * frequencies(width=2 * WIDTH),
    "attention-factor": POSITIONS * frequencies(),
    "tables-bfloat16": POSITIONS * frequencies(),
    "tables-float16": POSITIONS * frequencies(),
}
ROUNDED = {
    "product-bfloat16": 2.0**-8,
    "product-float16": 2.0**-11,
    "tables-bfloat16": 2.0**-8,
    "tables-float16": 2.0**-11,
}
"""Half of the distance of two numbers below 1, for tables that are rounded."""


@pytest.mark.parametrize("key", ANGLES)
def test_tables_are_those_of_the_formula(key: str) -> None:
    model = llama()
    with BUGS[key].spoil(model):
        tables = model.model.rotary_emb(torch.zeros(1), torch.tensor(POSITIONS.T, dtype=torch.long))
    factor = 1.2 if key == "attention-factor" else 1.0
    at_last = float(POSITIONS[-1, 0]) * 2.0**-24  # an angle in float32
    room = ROUNDED.get(key, 0.0) + (2.0**-23 if key == "exact-angles" else 2 * at_last + 2.0**-22)
    for table, function in zip(tables, (np.cos, np.sin), strict=True):
        expected = factor * np.tile(function(ANGLES[key]), 2)
        assert np.abs(table[0].double().numpy() - expected).max() <= room, key


def test_tf32_keeps_ten_bits_of_the_fraction() -> None:
    numbers = np.array([1.0, 2047.0, 2049.0, 2051.0, 4095.0, 4099.0, 0.1, -3.3])
    step = 2.0 ** (np.floor(np.log2(np.abs(numbers))) - 10)
    expected = np.sign(numbers) * np.floor(np.abs(numbers) / step + 0.5) * step
    assert tf32(torch.tensor(numbers)).tolist() == expected.tolist()


def rotated(key: str, q: Tensor, k: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return what the function inside a model with a bug makes of queries and keys at positions 0, 1, ..."""
    import transformers.models.llama.modeling_llama as module

    model = llama()
    with BUGS[key].spoil(model):
        tables = model.model.rotary_emb(q, torch.arange(q.shape[2])[None])
        return tuple(x.double().numpy() for x in module.apply_rotary_pos_emb(q, k, *tables))  # type: ignore[return-value]


def turned(x: np.ndarray, positions: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    """Rotate each pair of dimensions, one by one."""
    result = np.array(x, dtype=np.float64)
    for (a, b), frequency in zip(pairs, frequencies(), strict=True):
        cos, sin = np.cos(positions * frequency), np.sin(positions * frequency)
        result[..., a] = x[..., a] * cos - x[..., b] * sin
        result[..., b] = x[..., b] * cos + x[..., a] * sin
    return result


@pytest.mark.parametrize("key", ["half-as-interleaved", "interleaved-as-half", "keys-off-by-one", "heads-not-rotated"])
def test_queries_and_keys_are_rotated_as_the_sentence_says(key: str) -> None:
    q = torch.randn(1, 4, 7, WIDTH, generator=torch.Generator().manual_seed(2))
    k = torch.randn(1, 2, 7, WIDTH, generator=torch.Generator().manual_seed(3))
    half, count = WIDTH // 2, np.arange(7)
    halves = [(i, i + half) for i in range(half)]
    quarter = half // 2
    pairs = {
        "half-as-interleaved": [(2 * i, 2 * i + 1) for i in range(half)],
        # Weights of neighbours are these weights with their dimensions in another order: (0, 8, 1, 9, ...). Code of
        # halves then makes a pair of the dimensions at i and i + 8 of that order.
        "interleaved-as-half": [
            (i // 2 + half * (i % 2), i // 2 + half * (i % 2) + quarter) for i in range(half)
        ],
    }.get(key, halves)  # fmt: skip
    wanted = [turned(x.numpy().astype(np.float64), count, pairs) for x in (q, k)]
    if key == "keys-off-by-one":
        wanted[1] = turned(k.numpy().astype(np.float64), np.minimum(count + 1, 6), halves)
    if key == "heads-not-rotated":
        wanted[0][:, 2:], wanted[1][:, 1:] = q[:, 2:].numpy(), k[:, 1:].numpy()
    for ours, expected in zip(rotated(key, q, k), wanted, strict=True):
        assert np.abs(ours - expected).max() < LOGITS


NUMBERED = {
    "restarts": lambda p: p % (LENGTH // 2),
    "ranks-in-wrong-order": lambda p: (
        torch.tensor([0, 2, 3, 1])[p // (LENGTH // 4)] * (LENGTH // 4) + p % (LENGTH // 4)
    ),
    "gap": lambda p: torch.where(p < LENGTH // 2, p, p + GAP),
    "position-repeated": lambda p: torch.where(p < LENGTH // 2, p, p - 1),
}


@pytest.mark.parametrize("key", NUMBERED)
def test_positions_are_those_of_ids_with_a_causal_mask(key: str) -> None:
    """The oracle is a call of the model with these ids and a mask of four axes, as `transformers` documents."""
    model, index = llama(), torch.arange(LENGTH)[None]
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    given = {"input_ids": ids(), "position_ids": NUMBERED[key](index), "attention_mask": causal}
    ours = hidden(model, BUGS[key])
    torch.testing.assert_close(ours, hidden(model, **given), rtol=LOGITS, atol=LOGITS)
    assert not torch.allclose(ours, hidden(model), rtol=LOGITS, atol=LOGITS)
    assert BUGS[key].batch is not None
    assert torch.equal(BUGS[key].batch(LENGTH, 0)["position_ids"], given["position_ids"])


@pytest.mark.parametrize("key", ["", "packed-count-goes-on", "packed-documents-visible", "packed-as-one-text"])
def test_packed_rows_are_those_of_a_mask_of_four_axes(key: str) -> None:
    model, index = llama(), torch.arange(LENGTH)[None]
    bug = BUGS[key] if key else SCENARIOS["packed"].correct
    document = index[0] // (LENGTH // DOCUMENTS)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if "visible" not in key and key != "packed-as-one-text":
        visible = visible & (document == document[:, None])
    position_ids = index if key in ("packed-count-goes-on", "packed-as-one-text") else index % (LENGTH // DOCUMENTS)
    tokens = torch.cat([ids()[0], ids()[0, -1:]])
    arrangement = (bug.arrange or SCENARIOS["packed"].arrange)(tokens, 0)
    ours = hidden(model, bug, input_ids=arrangement.ids).reshape(1, LENGTH, -1)
    call = {"input_ids": ids(), "position_ids": position_ids, "attention_mask": visible[None, None]}
    torch.testing.assert_close(ours, hidden(model, **call), rtol=LOGITS, atol=LOGITS)
    ends = (arrangement.targets.flatten() == IGNORED).nonzero()[:, 0]
    assert ends.tolist() == [7, 15, 23, 31]  # the last token of a document has no target
    if bug.batch is not None:
        batch = bug.batch(LENGTH, 0)
        assert torch.equal(batch["position_ids"], position_ids)
        assert torch.equal(batch["attention_mask"], visible[None, None])


@pytest.mark.parametrize("key", ["", "padding-counted", "padding-visible"])
def test_padded_rows_are_those_of_a_mask(key: str) -> None:
    model, bug, pads = llama(), BUGS[key] if key else SCENARIOS["padded"].correct, LENGTH // DOCUMENTS
    tokens = torch.cat([ids()[0], ids()[0, -1:]])
    arrangement = (bug.arrange or SCENARIOS["padded"].arrange)(tokens, 0)
    ours = hidden(model, bug, input_ids=arrangement.ids)[0, -(LENGTH - pads) :]
    row = torch.cat([torch.zeros(1, pads, dtype=torch.long), ids()[:, : LENGTH - pads]], 1)
    mask = (torch.arange(LENGTH) >= (0 if key == "padding-visible" else pads)).long()[None]
    index = torch.arange(LENGTH)[None]
    call = {"input_ids": row, "attention_mask": mask, "position_ids": index if key else (index - pads).clamp(min=0)}
    torch.testing.assert_close(ours, hidden(model, **call)[0, pads:], rtol=LOGITS, atol=LOGITS)
    assert int((arrangement.targets != IGNORED).sum()) == LENGTH - pads


def test_padding_that_is_counted_changes_nothing_and_a_restart_does() -> None:
    """Scores of rotated queries and keys depend on distances, so that this one is harmless. The check can fail."""
    model = llama()
    alone = hidden(model)
    torch.testing.assert_close(hidden(model, BUGS["padding-counted"]), alone, rtol=LOGITS, atol=LOGITS)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(hidden(model, BUGS["restarts"]), alone, rtol=LOGITS, atol=LOGITS)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("local-base-everywhere", {"full": LOCAL}),
        ("global-base-everywhere", {"local": GLOBAL}),
        ("layers-exchanged", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("window-missing", {"window": 64}),
        ("window-everywhere", {"layer_types": ["sliding_attention"] * 3}),
    ],
)
def test_layers_of_gemma_are_those_of_another_configuration(key: str, changes: dict[str, Any]) -> None:
    model, other = gemma(), gemma(**changes)
    other.load_state_dict(model.state_dict())
    if key == "window-everywhere":  # whose full layers keep their base: the other model has one base for all layers
        model = gemma(full=LOCAL)
        model.load_state_dict(other.state_dict())
    torch.testing.assert_close(hidden(model, BUGS[key]), hidden(other), rtol=LOGITS, atol=LOGITS)
    assert not torch.allclose(hidden(model, BUGS[key]), hidden(model), rtol=LOGITS, atol=LOGITS)


def test_heads_are_normed_after_they_are_rotated() -> None:
    """One layer of one head against the formula: RMSNorm of the rotated head, times one plus the weights."""
    model, x = gemma(), torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(4))
    layer = model.model.layers[1].self_attn
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH))
    seen: list[np.ndarray] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        seen.extend(each.double().numpy() for each in (q, k))
        return q.transpose(1, 2), None

    import transformers.models.gemma3.modeling_gemma3 as code

    tables = model.model.rotary_emb(x, torch.arange(5)[None], "full_attention")
    with pytest.MonkeyPatch.context() as patch, BUGS["norm-after-rotation"].spoil(model), torch.no_grad():
        patch.setattr(code.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attend)
        layer(hidden_states=x, position_embeddings=tables)
    for found, projection in zip(seen, (layer.q_proj, layer.k_proj), strict=True):
        heads = projection(x).detach().double().numpy().reshape(1, 5, -1, WIDTH).transpose(0, 2, 1, 3)
        result = np.array(heads)
        for pair, frequency in enumerate(frequencies(GLOBAL)):
            angle, a, b = np.arange(5) * frequency, heads[..., pair], heads[..., pair + WIDTH // 2]
            result[..., pair] = a * np.cos(angle) - b * np.sin(angle)
            result[..., pair + WIDTH // 2] = b * np.cos(angle) + a * np.sin(angle)
        result /= np.sqrt((result**2).mean(-1, keepdims=True) + layer.config.rms_norm_eps)
        assert np.abs(found - result * (1 + np.linspace(-0.5, 0.5, WIDTH))).max() < LOGITS


@pytest.mark.parametrize("key", BUGS)
def test_nothing_is_left_of_a_bug(key: str) -> None:
    """Also if the model fails while the bug is in place."""
    model = llama() if "smollm2" in BUGS[key].models else gemma()
    before = hidden(model)
    with pytest.raises(ZeroDivisionError), BUGS[key].spoil(model):
        raise ZeroDivisionError
    assert torch.equal(hidden(model), before)


def test_losses_are_those_of_the_logits() -> None:
    model, tokens = llama(), torch.cat([ids()[0], ids()[0, :1]])
    arrangement = SCENARIOS["text"].arrange(tokens, 0)
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1]).logits[0].double().numpy()
    highest = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - highest).sum(-1)) + highest[:, 0]
    expected = log_sum - logits[np.arange(LENGTH), tokens[1:]]
    for stride in (1, 4):
        found = losses(model, arrangement, stride).double().numpy()
        assert np.abs(found - expected[stride - 1 :: stride]).max() < LOGITS


def test_windows_are_adjacent_and_documents_are_far_from_each_other() -> None:
    tokens = {"a": list(range(1000)), "b": list(range(1000, 2000))}
    found = windows(tokens, [7], 10, 4)
    assert [each.tolist() for each in found[::2]] == [[7, *range(10)], [7, *range(10, 20)]]
    assert found[1].tolist() == [7, *range(1000, 1010)]
    (row,) = packed_windows(tokens, [7], 16, 1)
    assert row.tolist() == [7, 0, 1, 2, 7, 1000, 1001, 1002, 7, 3, 4, 5, 7, 1003, 1004, 1005, 1005]


def test_every_bug_names_entries_of_the_museum_and_most_a_thread() -> None:
    entries = {row[0] for row in table_under("entries", README.read_text(encoding="utf-8"))}
    assert {entry for bug in BUGS.values() for entry in bug.entries} <= entries
    assert sum(bool(bug.source) for bug in BUGS.values()) >= 20
    assert len(BUGS) >= 40
