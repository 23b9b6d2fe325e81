"""Entries about which dimensions form a pair: two conventions, and weights that know only one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from locant import InputError, Positions, Rotary, attend
from locant.checkpoints import convert_layout
from locant.lab.audit import audit
from tests.known_bugs.exhibit import exhibit
from tests.lab.test_audit import LARGER, LENGTH, WINDOWS, llama, saved, weights_of
from tests.positions.published import PUBLISHED
from tests.tolerances import DOUBLE

HEADS, KEY_HEADS, HEAD_DIM, WIDTH, TOKENS = 4, 2, 6, 5, 7
HERE = Positions.after(700, TOKENS)
Weights = Mapping[str, Tensor]
Convert = Callable[..., Weights]

LLAMA = {
    "model_type": "llama", "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD_DIM, "rope_theta": 10_000.0,
}  # fmt: skip
FUSED = {
    "model_type": "falcon", "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_kv_heads": KEY_HEADS,
    "new_decoder_architecture": True, "rope_theta": 10_000.0,
}  # fmt: skip
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
QKV = "transformer.h.0.self_attention.query_key_value.weight"


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as ``1 heads seq head_dim``."""
    if QKV in weights:  # as Falcon has them: two queries, their key and its value
        groups = (x @ weights[QKV].T).view(1, TOKENS, KEY_HEADS, 4, HEAD_DIM)
        found = groups[:, :, :, :2].flatten(2, 3), groups[:, :, :, 2], groups[:, :, :, 3]
    else:
        found = tuple((x @ weights[name].T).view(1, TOKENS, -1, HEAD_DIM) for name in (Q, K, V))
    q, k, v = (part.transpose(1, 2) for part in found)
    return q, k, v


def attended(weights: Weights, x: Tensor, layout: str) -> Tensor:
    q, k, v = parts(weights, x)
    q, k = Rotary(HEAD_DIM, layout=layout).rotate(q, k, HERE)  # type: ignore[arg-type]
    return attend(q, k, v, positions=HERE, backend="eager")


def passes_weights_on(weights: Weights, config: Any, *, to: str, source: str) -> Weights:
    """The twin: a conversion that renames and copies, and never hears of layouts."""
    return {name: tensor.clone() for name, tensor in weights.items()}


def test_52_the_two_layouts_are_one_rotation_of_reordered_dimensions() -> None:
    """Pairs are neighbours in code for weights with halves.

    karpathy/nanochat#264, warpfront/hipfire#241, dan-v/shainet#111: The first tokens were right, and then came garbage.
    Pairs of neighbours were rotated in weights made for halves, and at position 0 both layouts are equal.

    Check: `locant probe FOLDER` prints the layout of the code, and `locant audit FOLDER` that of the weights.

    Test: reordered dimensions, bit for bit, up to position 2^31 - 1. Nothing in weights says their layout: that a
    conversion asks for it is in `tests/checkpoints/test_layout.py`.
    """
    x = torch.randn(1, HEADS, TOKENS, HEAD_DIM)
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # what stands where once pairs are neighbours

    def ours(x: Tensor, positions: Positions) -> Tensor:
        """Rotated as neighbours, after the dimensions took their places, and put back."""
        rotated = Rotary(HEAD_DIM, layout="interleaved").rotate(x[..., order], x[..., order], positions)[0]
        return rotated[..., order.argsort()]

    def without_reordering(x: Tensor, positions: Positions) -> Tensor:
        return Rotary(HEAD_DIM, layout="interleaved").rotate(x, x, positions)[0]

    def check(interleaved: Callable[[Tensor, Positions], Tensor]) -> None:
        for begin in (0, 1, 100, 2**31 - TOKENS):
            positions = Positions.after(begin, TOKENS)
            half = Rotary(HEAD_DIM, layout="half").rotate(x, x, positions)[0]
            same = (interleaved(x, positions) == half).all(-1).all(1).all(0)
            first = begin + int((~same).nonzero()[0]) if not same.all() else None
            assert same.all(), f"from position {first} on, the two layouts are two rotations"

    exhibit(check, ours, twin=without_reordering, because="from position 1 on, the two layouts are two rotations")


SPLIT = {Q: HEADS * HEAD_DIM, K: KEY_HEADS * HEAD_DIM, V: KEY_HEADS * HEAD_DIM}


@pytest.mark.parametrize(
    ("config", "rows"), [(LLAMA, SPLIT), (FUSED, {QKV: sum(SPLIT.values())})], ids=["split", "fused"]
)
def test_53_converted_weights_attend_as_before(config: Any, rows: Mapping[str, int]) -> None:
    """A conversion does not reorder fused projections.

    huggingface/nanotron#427 and #241: Attention was corrupt after a conversion. The conversion has an argument that
    interleaves the rows of fused projections, and the script that calls it never passed it.

    Check: `locant audit FOLDER` on the converted weights.

    Test: attention in both layouts with separate and fused projections; bytes there and back.
    """
    weights = {name: random(count, WIDTH) for name, count in rows.items()}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    x = random(TOKENS, WIDTH)

    def check(convert: Convert) -> None:
        there = convert(weights, config, to="interleaved", source="half")
        off = float((attended(there, x, "interleaved") - attended(weights, x, "half")).abs().max())
        assert off <= DOUBLE, f"attention is off by {off:.2g} after the conversion"
        back = convert(there, config, to="half", source="interleaved")
        for name, tensor in before.items():
            assert back[name].numpy().tobytes() == tensor.numpy().tobytes(), f"{name} did not come back"
            assert torch.equal(weights[name], tensor), f"{name} was written to"

    def forgets_the_keys(weights: Weights, config: Any, *, to: Any, source: Any) -> Weights:
        queries = {name: tensor for name, tensor in weights.items() if name == Q}
        return {**weights, **(convert_layout(queries, config, to=to, source=source) if queries else {})}

    exhibit(check, convert_layout, twin=passes_weights_on, because="attention is off by [0-9.]+ after the conversion")
    exhibit(check, convert_layout, twin=forgets_the_keys, because="attention is off by [0-9.]+ after the conversion")


TAUGHT = {
    "Llama-3.2-1B": "half", "Qwen3-8B": "half", "gemma-2-9b": "half", "gpt-neox-20b": "half", "phi-2": "half",
    "gpt-j-6b": "interleaved", "DeepSeek-V3": "interleaved",
}  # fmt: skip


def test_54_an_architecture_brings_its_layout_along() -> None:
    """Teaching code rotates the other layout than its weights.

    rasbt/LLMs-from-scratch#750: Teaching code rotated pairs of the other layout in weights that others had trained. A
    configuration does not state the layout: the architecture does.

    Check: `locant explain FOLDER` prints the layout of the architecture.

    Test: the layout of seven published models; an unknown one is asked for.
    """

    def check(layout_of: Callable[[Mapping[str, Any]], str]) -> None:
        for name, layout in TAUGHT.items():
            found = layout_of(PUBLISHED[name])
            assert found == layout, f"{name}: rotated as {found}, and trained as {layout}"
        unknown = {**PUBLISHED["Llama-3.2-1B"], "model_type": "my-own"}
        with pytest.raises(InputError, match="layout='half' or 'interleaved'"):
            layout_of(unknown)

    def ours(config: Mapping[str, Any]) -> str:
        return Rotary.from_config(config).layout

    because = "gpt-j-6b: rotated as half, and trained as interleaved"
    exhibit(check, ours, twin=lambda config: Rotary(64).layout, because=because)


def test_97_both_members_of_a_pair_turn_by_one_angle() -> None:
    """Both members of a pair get different angles.

    facebookresearch/vjepa2#15: Tables that were repeated for halves were applied to pairs of neighbours. That is not a
    rotation: lengths change, and scores depend on more than distances.

    Check: `locant.probe(rotate, head_dim=64)` reports that the members of pairs get different angles.

    Test: lengths of random tokens, and their scores under a common shift, in both layouts. V-JEPA 2 was trained so: it
    is refused by name, and read when asked for, in `tests/models`. Nothing fails, so that models were trained with it;
    `locant.probe` names it, in `tests/probing/test_broken.py`.
    """
    x = random(1, 1, TOKENS, HEAD_DIM)

    def check(rotate: Callable[[Tensor, Positions], Tensor]) -> None:
        here, there = rotate(x, HERE), rotate(x, Positions.after(3, TOKENS))
        changed = (here.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max()
        moved = (here @ here.mT - there @ there.mT).abs().max() / x.norm(dim=-1).max() ** 2
        assert max(changed, moved) <= DOUBLE, "lengths change, and scores when both sides move on"

    def repeated(x: Tensor, positions: Positions) -> Tensor:
        """The twin: the first and the second of neighbours stand at different places of the table."""
        cos, sin = (part[:, None].repeat(1, 1, 1, 2) for part in Rotary(HEAD_DIM).cos_sin(positions, x.dtype))
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cos + torch.stack((-second, first), -1).flatten(-2) * sin

    half, interleaved = Rotary(HEAD_DIM), Rotary(HEAD_DIM, layout="interleaved")
    exhibit(check, half.rotate_one, interleaved.rotate_one, twin=repeated, because="lengths change")


@pytest.mark.slow
def test_109_weights_in_another_layout_than_their_code_are_told(tmp_path: Path) -> None:
    """A published model has its weights in the other layout.

    WestWaters/pollard-weights#70: A published model was read in the other layout, with a loss of 5.02 nats instead of
    1.86. Every key is there and every shape fits, so nothing fails.

    Check: `locant audit FOLDER`.

    Test: `audit` on weights of pairs of neighbours, saved for code of halves; other hypotheses in
    `tests/lab/test_audit.py`.
    """
    weights, _ = weights_of("interleaved", {})
    trained = llama(LARGER)
    ordered = convert_layout(weights, trained.config, to="half", source="interleaved")

    def check(reads_as: Callable[[str, Sequence[str]], str]) -> None:
        for kind, state, expected in (
            ("right", ordered, "the configuration"),
            ("wrong", weights, "interleaved layout"),
        ):
            trained.load_state_dict(state)
            (tmp_path / kind).mkdir(exist_ok=True)
            found = reads_as(*saved(trained, tmp_path / kind))
            assert found == expected, f"weights of the {kind} layout are read as {found}"

    def ours(folder: str, files: Sequence[str]) -> str:
        return audit(folder, files, length=LENGTH, windows=WINDOWS)["best"]

    def by_keys_and_shapes(folder: str, files: Sequence[str]) -> str:
        _, told = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        return "another" if any(told.values()) else "the configuration"

    exhibit(check, ours, twin=by_keys_and_shapes, because="weights of the wrong layout are read as the configuration")
