"""Known bugs 101 to 108, 119 and 121: what trainers, converters and servers make of one model's positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from locant import LocantError, Positions, Rotary, Sinusoidal, swap
from locant.engines.batches import check_batch, pack_documents
from locant.positions.scaling import Unscaled, YaRN
from tests.known_bugs.exhibit import exhibit
from tests.tolerances import LENGTH, LOGITS

TRAINED = 4096
Check = Callable[..., tuple[str, ...]]


def test_101_yarn_acts_at_the_trained_length_too() -> None:
    """YaRN is off at the trained length.

    pytorch/torchtitan#4117: A cache for just the trained length was made as if no scaling were configured. YaRN's
    frequencies and its attention factor act at every length.

    Check: `locant.probe(rotary, expected=locant.encoding_from_config(config))`, with the trained length as the maximum.

    Test: YaRN by 40 in a cache of just the trained length: the size of its cosines.
    """
    rotary = Rotary(64, scaling=YaRN(factor=40.0, original_max_seq_len=TRAINED))

    def check(cache_of: Callable[[Rotary, int], Tensor]) -> None:
        cache = cache_of(rotary, TRAINED)
        size = (cache[:, 0] ** 2 + cache[:, 32] ** 2).sqrt().mean().item()
        assert abs(size - (1 + 0.1 * np.log(40))) <= LENGTH * size, f"cosines have the size {size:.3g}"  # of the paper

    def guarded(rotary: Rotary, n: int) -> Tensor:
        return (rotary if n > TRAINED else rotary.replace(scaling=Unscaled())).cos_sin_cache(n)

    exhibit(check, Rotary.cos_sin_cache, twin=guarded, because="cosines have the size 1")


def test_102_the_ends_of_the_ramp_are_not_exchanged() -> None:
    """`beta_fast` and `beta_slow` are exchanged.

    pytorch/torchtitan#3787: The code used `beta_fast` where it needed `beta_slow`, and the other way round.
    Configuration files made up for it.

    Check: `locant explain FOLDER` refuses a `beta_fast` below `beta_slow`.

    Test: `beta_fast` below `beta_slow` is refused.
    """

    def check(build: Callable[..., YaRN]) -> None:
        try:
            build(factor=4.0, original_max_seq_len=TRAINED, beta_fast=1.0, beta_slow=32.0)
        except LocantError:
            return
        raise AssertionError("a ramp from 1 to 32 rotations is taken for one from 32 to 1")

    def sorting(*, beta_fast: float, beta_slow: float, **rest: Any) -> YaRN:
        return YaRN(beta_fast=max(beta_fast, beta_slow), beta_slow=min(beta_fast, beta_slow), **rest)

    exhibit(check, YaRN, twin=sorting, because="is taken for one from 32 to 1")


def test_103_a_file_without_the_factors_of_its_configuration_is_told(tmp_path: Path) -> None:
    """A GGUF file lacks LongRoPE's factors.

    ggml-org/llama.cpp#24820: A converter read an older key of the configuration. It left LongRoPE's factors out of the
    file.

    Check: `locant explain model.gguf --against FOLDER`.

    Test: a GGUF file without LongRoPE's factors beside the configuration that has them; other scalings in
    `tests/engines/test_gguf.py`.
    """
    pytest.importorskip("gguf", reason="gguf is not installed")
    from locant.engines.gguf import compare_gguf, read_gguf
    from tests.gguf_files import scaled_model, write_gguf

    plain, stretched = scaled_model("llama", "default"), scaled_model("llama", "longrope")
    path = write_gguf(plain, tmp_path / "a.gguf")

    def check(agrees: Callable[[Path, dict[str, Any]], bool]) -> None:
        assert agrees(path, plain.config.to_dict())
        assert not agrees(path, stretched.config.to_dict()), "the factors are missing, and nothing is said"

    def by_base(path: Path, config: dict[str, Any]) -> bool:
        encoding = read_gguf(path).encoding
        return isinstance(encoding, Rotary) and encoding.base == config["rope_parameters"]["rope_theta"]

    exhibit(check, lambda *pair: compare_gguf(*pair).agrees, twin=by_base, because="the factors are missing")


def test_104_every_layout_has_the_attention_factor() -> None:
    """One layout ignores the attention factor.

    GaijinEntertainment/daScript#3479: The code for one layout multiplied by the attention factor. The code for the
    other layout did not.

    Check: `locant.probe(rotate, head_dim=64)` prints the factor of queries and keys, in each layout.

    Test: both layouts with the factor 1.4.
    """
    scaling = YaRN(factor=4.0, original_max_seq_len=64, attention_factor=1.4)
    x = torch.randn(1, 2, 7, 32)

    def check(rotate: Callable[[Rotary], Tensor]) -> None:
        for layout in ("half", "interleaved"):
            rotated = rotate(Rotary(32, scaling=scaling, layout=layout))
            ratio = (rotated.norm(dim=-1) / x.norm(dim=-1)).mean().item()
            assert abs(ratio - 1.4) <= LENGTH * 1.4, f"{layout}: vectors are {ratio:.3g} times as long"

    def ours(rotary: Rotary) -> Tensor:
        return rotary.rotate_one(x, Positions.arange(7))

    def forgetting(rotary: Rotary) -> Tensor:
        return ours(rotary) / (1.4 if rotary.layout == "interleaved" else 1.0)

    exhibit(check, ours, twin=forgetting, because="interleaved: vectors are 1 times as long")


def _by_shapes(batch: Mapping[str, Any], **_: Any) -> tuple[str, ...]:
    """What a trainer checks: every tensor has as many tokens as the ids."""
    length = batch["input_ids"].shape[-1]
    tensors = [value for name, value in batch.items() if isinstance(value, Tensor) and "cu_" not in name]
    return () if all(value.shape[-1] == length for value in tensors) else ("sizes differ",)


def _by_lengths(batch: Mapping[str, Any], **_: Any) -> tuple[str, ...]:
    """Whether cumulative lengths rise."""
    return () if bool((batch["cu_seq_lens_q"].diff() > 0).all()) else ("lengths fall",)


BATCH = pack_documents([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])


def finds(fault: str, batch: Mapping[str, Any], **options: Any) -> Callable[[Check], None]:
    """A check that nothing is said of a sound batch, and something of this one."""

    def check(check_batch: Check) -> None:
        assert check_batch(BATCH) == ()
        assert check_batch(batch, **options), f"{fault}, and nothing is said"

    return check


def test_105_ids_of_one_axis_are_told_where_a_model_has_three() -> None:
    """Position ids have one axis and the model needs three.

    axolotl-ai-cloud/axolotl#3817: A packed batch had position ids of two dimensions. The axes of images were never
    computed.

    Check: `locant check-batch batch.safetensors --model FOLDER`.

    Test: `check_batch` on a packed batch of text, for a model with three axes.
    """
    fault = "images are counted as text"
    exhibit(finds(fault, BATCH, axes=3), check_batch, twin=_by_shapes, because=fault)


def test_106_every_number_of_a_mask_is_a_token() -> None:
    """A mask that numbers documents counts only the ones.

    hiyouga/LlamaFactory#7754: Rows were packed with a mask of 1, 1, 2, 2. Only the ones were counted as tokens.

    Check: `attention_mask.max()`: if it is above 1, count with `mask > 0`.

    Test: `Positions.from_batch` of a mask that numbers two documents.
    """
    mask = torch.tensor([[1, 1, 2, 2, 2]])

    def check(index_of: Callable[[Tensor], Tensor]) -> None:
        index = index_of(mask)
        assert index.tolist() == [[0, 1, 0, 1, 2]], f"the second document is counted {index[0, 2:].tolist()}"

    def of_ones(mask: Tensor) -> Tensor:
        return ((mask == 1).cumsum(dim=1) - 1).clamp(min=0)

    def ours(mask: Tensor) -> Tensor:
        return Positions.from_batch({"attention_mask": mask}).index

    exhibit(check, ours, twin=of_ones, because="the second document is counted")


def test_107_ids_that_were_padded_without_their_positions_are_told() -> None:
    """Tokens are padded and position ids are not.

    hiyouga/LlamaFactory#10783: Tokens were padded to a multiple of 8. Position ids were not, so there were fewer ids
    than tokens.

    Check: `locant check-batch batch.safetensors`.

    Test: `check_batch` on five positions for eight tokens; other sizes in `tests/engines/test_batches.py`.
    """
    padded = {**BATCH, "input_ids": torch.nn.functional.pad(BATCH["input_ids"], (0, 3))}
    fault = "five positions for eight tokens"
    exhibit(finds(fault, padded), check_batch, twin=_by_lengths, because=fault)


def test_108_lengths_with_and_without_padding_are_not_mixed() -> None:
    """Cumulative lengths count padding and the tokens do not.

    radixark/miles#1272, NVIDIA-NeMo/Megatron-Bridge#4507: The cumulative lengths counted the padding of each document.
    The tokens came without padding, so boundaries lay in the wrong places.

    Check: `locant check-batch batch.safetensors`, with `cu_seq_lens_q` in the batch.

    Test: `check_batch` on lengths of padded documents.
    """
    mixed = {**BATCH, "cu_seq_lens_q": torch.tensor([0, 4, 8]), "cu_seq_lens_k": torch.tensor([0, 4, 8])}
    fault = "lengths of eight tokens for five"
    exhibit(finds(fault, mixed), check_batch, twin=_by_lengths, because=fault)


def _by_two_axes(batch: Mapping[str, Any], **_: Any) -> tuple[str, ...]:
    """What a trainer looks at: whether a mask of two axes stands beside ids that begin again."""
    mask, ids = batch.get("attention_mask"), batch["position_ids"]
    hidden = mask is not None and mask.ndim == 2 and bool((ids.diff(dim=-1) <= 0).any())
    return ("documents are hidden",) if hidden else ()


def test_121_ids_that_begin_again_hide_nothing_beside_a_mask_of_four_axes() -> None:
    """Position ids restart, but the mask shows other documents.

    huggingface/nanoVLM#204, DeepOpt-com/WrinkleFree-Monorepo#53, pytorch/torchtitan#4801: The position ids of packed
    documents began again, and the mask was an ordinary causal one. Each document sees the documents before it,
    regardless of the ids.

    Check: `locant check-batch batch.safetensors`.

    Test: a tiny Llama and `check_batch` on a row of two documents, with a causal mask and with blocks; other masks in
    `tests/engines/test_batch_harm.py`.
    """
    row = torch.ones(5, 5).tril()
    blocks = row * torch.tensor([[1, 1, 1, 0, 0]] * 3 + [[0, 0, 0, 1, 1]] * 2)
    leaking, sound = ({**BATCH, "attention_mask": mask.bool()[None, None]} for mask in (row, blocks))
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        del leaking[name], sound[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    with torch.no_grad():
        alone = model(input_ids=BATCH["input_ids"][:, 3:]).logits
        seen = [model(**batch, use_cache=False).logits[:, 3:] - alone for batch in (sound, leaking)]
    assert seen[0].abs().max() <= LOGITS < seen[1].abs().max()
    assert check_batch(sound) == ()
    fault = "token 3 sees the document before"
    exhibit(finds(fault, leaking), check_batch, twin=_by_two_axes, because=fault)


def _by_order(batch: Mapping[str, Any], **_: Any) -> tuple[str, ...]:
    """What a trainer checks: there are three axes of as many ids as tokens, and none of them falls in text."""
    ids = batch["position_ids"]
    return () if ids.ndim == 2 or bool((ids[:, 0, -1] >= ids[:, 0, 0]).all()) else ("ids fall",)


@pytest.mark.parametrize("fault", ["flattened", "the time of a still image scaled", "rows and columns exchanged"])
def test_119_ids_of_images_are_those_of_the_rule_of_the_model(fault: str) -> None:
    """Position ids of images do not follow the model's rule.

    huggingface/transformers#45325, NVIDIA-NeMo/Automodel#2172, areal-project/AReaL#217, QwenLM/Qwen3-VL#488: Position
    ids of images were flattened, scaled or exchanged. They have the right shape and dtype, and the model sees its
    images scrambled.

    Check: `locant check-batch batch.safetensors --model FOLDER`.

    Test: `check_batch` on ids that are flattened, scaled and exchanged; more of them beside every model's
    `get_rope_index` in `tests/engines/test_batch_images.py`.
    """
    parts = [2, (1, 4, 8), 3]  # of which Qwen2.5-VL makes 2, 8 and 3 tokens
    index = Positions.multimodal(parts, merge=2).index.movedim(-1, 0)
    image = (torch.arange(13) >= 2) & (torch.arange(13) < 10)
    wrong = {
        "flattened": torch.arange(13).expand(3, 1, 13),
        "the time of a still image scaled": torch.cat([torch.where(image, 4 * index[:1], index[:1]), index[1:]]),
        "rows and columns exchanged": index[[0, 2, 1]],
    }[fault]
    batch = {
        "input_ids": torch.ones(1, 13), "mm_token_type_ids": image.long()[None],
        "image_grid_thw": torch.tensor([[1, 4, 8]]), "position_ids": wrong,
    }  # fmt: skip
    assert check_batch({**batch, "position_ids": index}, axes=3) == ()
    exhibit(finds(fault, batch, axes=3), check_batch, twin=_by_order, because=fault)


class _Noting(Sinusoidal):
    """Notes where the tokens are that it is asked for."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.seen: list[Tensor] = []

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        self.seen.append(positions.index.expand(len(x), -1))
        return super().embed(x, positions)


def test_110_the_ids_of_generated_tokens_are_compared_and_not_their_text() -> None:
    """Position ids in generation count padding.

    huggingface/transformers#40490: Position ids were prepared wrongly in generation, and every slow test passed. With
    rotary positions only distances matter, so tests that compare the generated text do not see it.

    Check: Print `position_ids` in `prepare_inputs_for_generation` for a row padded on the left: its first token has 0.

    Test: the ids that a swapped GPT-2 gives to generated tokens behind padding.
    """
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 7, 8, 9]])
    expected = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]])

    def check(ids_in_generation: Callable[[], Tensor]) -> None:
        seen = ids_in_generation()
        wrong = (seen != expected) & torch.cat([mask, mask.new_ones(2, 2)], 1).bool()
        assert not wrong.any(), f"{int(wrong.sum())} tokens have the id of another place"

    def ours() -> Tensor:
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 11, "bos_token_id": 0, "eos_token_id": 10}
        model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
        noting = _Noting(16)
        with swap(model, noting):
            model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False,
                           pad_token_id=0)  # fmt: skip
        return torch.cat(noting.seen, 1)

    def by_slots() -> Tensor:
        return torch.arange(7).expand(2, -1)

    exhibit(check, ours, twin=by_slots, because="5 tokens have the id of another place")
