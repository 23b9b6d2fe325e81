"""`PerLayerEmbedding` and `PerLayerGate`: what the layers of Gemma get and add, in `transformers`' bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from locant import InputEmbedding, InputError, PerLayerEmbedding, RangeError, ShapeError
from locant.checkpoints.explanation import explain
from locant.checkpoints.gguf_model import load_gguf_config
from locant.embedding import PerLayerGate, RowAdagrad, TableFile
from tests.refusal import refuses

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 12, "intermediate_size": 16, "rms_norm_eps": 1e-5, "hidden_size_per_layer_input": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "pad_token_id": 3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"vocab_size_per_layer_input": 53, "num_kv_shared_layers": 0, "laurel_rank": 4,
                     "activation_sparsity_pattern": [0.0] * 3},
    "gemma4_text": {"vocab_size_per_layer_input": 61, "global_head_dim": 16},
    "embedding_gemma2_text": {},
}  # fmt: skip
PLACEHOLDERS = {"image_token_id": 50, "video_token_id": 51, "audio_token_id": 52}
DTYPES = [torch.float32, torch.bfloat16]


def small(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model of this family."""
    config = transformers.AutoConfig.for_model(name, **SIZES, **FAMILIES[name])
    return randomize(transformers.AutoModel.from_config(config).to(dtype))


def randomize(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def small_multimodal() -> Any:
    """A Gemma 4 with small towers, whose text model has the prefix of a part."""
    text = {**SIZES, **FAMILIES["gemma4_text"]}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **PLACEHOLDERS)
    return randomize(transformers.Gemma4ForConditionalGeneration(config))


def some_ids(dtype: torch.dtype) -> Tensor:
    """Ids, twice in float32. torch sums the gradient of a row in bfloat16, and here it is summed in float32."""
    unique = 1 + torch.randperm(48)[:28].view(2, 14)
    unique[0, 4] = 3
    return torch.cat([unique, unique.flip(1)], 1) if dtype == torch.float32 else unique


def their_parts(model: Any, ids: Tensor, x: Tensor) -> Tensor:
    if hasattr(model, "ple"):
        return model.ple(x)
    return model.project_per_layer_inputs(x, model.get_per_layer_inputs(ids))


def require_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()


# ---------------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_and_their_gradients_are_transformers(name: str, dtype: torch.dtype) -> None:
    theirs = small(name, dtype)
    ours = PerLayerEmbedding.from_config(theirs.config).to(dtype)
    tables = [] if ours.weight is None else [theirs.embed_tokens_per_layer.weight]
    place = theirs.ple if hasattr(theirs, "ple") else theirs
    parameters = [place.per_layer_model_projection.weight, place.per_layer_projection_norm.weight, *tables]
    names = ["projection.weight", "norm", *(["weight"] if tables else [])]
    ours.load_state_dict(dict(zip(names, parameters, strict=True)))
    ids, x = some_ids(dtype), torch.randn(2, 28 if dtype == torch.float32 else 14, 24, dtype=dtype, requires_grad=True)
    if name == "gemma3n_text":
        ids[0, 2] = 57  # the table has 53 rows
    expected, found = their_parts(theirs, ids, x), ours(ids, x)
    cotangent = torch.randn_like(expected)
    require_equal([found], [expected])
    require_equal(
        torch.autograd.grad(found, [x, *(ours.get_parameter(each) for each in names)], cotangent),
        torch.autograd.grad(expected, [x, *parameters], cotangent),
    )


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_resizing_gives_both_tables_the_rows_that_they_have_in_transformers(name: str) -> None:
    theirs = small(name)
    ours = InputEmbedding(61, 24, per_layer=PerLayerEmbedding.from_config(theirs.config))
    theirs.resize_token_embeddings(70, mean_resizing=False)
    ours.resize(70)
    assert ours.per_layer is not None
    assert ours.token.weight.shape == theirs.get_input_embeddings().weight.shape == (70, 24)
    assert ours.per_layer.weight.shape == theirs.embed_tokens_per_layer.weight.shape == (70, 18)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gate_in_a_layer_and_its_gradients_are_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The values are those inside of a running model."""
    theirs, seen = small(name, dtype), dict[str, Tensor]()
    theirs.save_pretrained(tmp_path)
    layer = theirs.layers[1]
    block = getattr(layer, "ple_block", layer)
    gate, projection, norm = block.per_layer_input_gate, block.per_layer_projection, block.post_per_layer_input_norm
    gate.register_forward_pre_hook(lambda _, given: seen.update(hidden=given[0]))
    norm.register_forward_hook(lambda _, __, out: seen.update(out=out))

    def keep_part(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [each for each in (*given, *named.values()) if isinstance(each, Tensor) and each.shape[-1] == 6]
        seen["part"] = values[0]

    layer.register_forward_pre_hook(keep_part, with_kwargs=True)
    theirs(input_ids=some_ids(dtype))
    ours = PerLayerGate.from_pretrained(tmp_path, 1).requires_grad_(True)
    hidden, part = (seen[each].detach().requires_grad_(True) for each in ("hidden", "part"))
    found, cotangent = ours(hidden, part), torch.randn_like(seen["out"])
    require_equal([found], [seen["out"]])
    require_equal(
        torch.autograd.grad(found, [hidden, part, ours.gate.weight, ours.projection.weight, ours.norm], cotangent),
        torch.autograd.grad(
            seen["out"], [seen["hidden"], seen["part"], gate.weight, projection.weight, norm.weight], cotangent
        ),
    )


def test_a_multimodal_gemma_4_reads_its_padding_for_images(tmp_path: Path) -> None:
    """Its folder has several files and prefixes. The parts are those that its layers get."""
    theirs, seen = small_multimodal(), list[Tensor]()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    for layer in theirs.model.language_model.layers:
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    ids = torch.randint(10, 50, (2, 9))
    ids[0, 2:5], ids[1, 3], ids[1, 7] = 50, 51, 52
    with torch.no_grad():
        theirs(input_ids=ids)
    ours = InputEmbedding.from_pretrained(tmp_path)
    per_layer = ours.per_layer
    assert per_layer is not None
    assert per_layer.placeholder_ids == (50, 51, 52)
    x = ours(torch.where(ids >= 50, 3, ids))  # their features replace these vectors later
    assert torch.equal(per_layer(ids, x), torch.stack(seen, 2))
    alone = PerLayerEmbedding.from_pretrained(tmp_path)
    assert torch.equal(alone(ids, x), per_layer(ids, x))
    text_alone = theirs.config.get_text_config().to_dict()
    assert PerLayerEmbedding.from_config(text_alone).placeholder_ids == ()


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_embeddings_without_ids_have_their_projection_alone(name: str) -> None:
    theirs = small(name)
    ours = PerLayerEmbedding.from_config(theirs.config)
    ours.projection.weight, ours.norm = (
        theirs.per_layer_model_projection.weight,
        theirs.per_layer_projection_norm.weight,
    )
    x = torch.randn(2, 5, 24)
    assert torch.equal(ours(None, x), theirs.project_per_layer_inputs(x))


def test_float64_is_not_rounded() -> None:
    """The modeling code computes norms in float32."""
    embedding, gate = PerLayerEmbedding(11, 2, 4, 8).double(), PerLayerGate(8, 4).double()
    ids = torch.tensor([[1, 10, 1]])
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gate(x, embedding(ids, x)[:, :, 1]), x)


# ---------------------------------------------------------------------- tables in files, graphs, explain


def test_a_table_in_a_file_has_the_bits_of_one_in_memory(tmp_path: Path) -> None:
    """Its gradient has the rows that were read, and a process that ends returns to its checkpoint."""
    dense = PerLayerEmbedding(40, 3, 4, 8, padding_idx=0)
    file = TableFile.create(tmp_path / "table.safetensors", num_rows=40, width=12)
    with torch.no_grad():
        file.weight.copy_(dense.weight)
    file.checkpoint(1)
    with torch.device("meta"):
        mapped = PerLayerEmbedding(40, 3, 4, 8, padding_idx=0)
    mapped.load_state_dict(dense.state_dict(), assign=True)
    mapped.use_file(file)
    ids, x = torch.tensor([[0, 5, 7], [5, 39, 5]]), torch.randn(2, 3, 8)
    expected, found = dense(ids, x), mapped(ids, x)
    require_equal([found], [expected])
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    found.backward(cotangent)
    gradient, before = mapped.weight.grad, file.weight.clone()
    assert gradient is not None
    assert gradient.coalesce().indices()[0].tolist() == [5, 7, 39]
    assert torch.equal(gradient.to_dense(), dense.weight.grad)
    RowAdagrad([mapped.weight], lr=0.1, file=file).step()
    assert (file.weight != before).any(1).nonzero()[:, 0].tolist() == [5, 7, 39]
    file.close()
    assert torch.equal(TableFile.open(tmp_path / "table.safetensors", 1).weight, before)
    with refuses(ShapeError, "40 rows of width 12"):
        mapped.use_file(TableFile.create(tmp_path / "narrow.safetensors", num_rows=40, width=11))


@pytest.mark.slow
@pytest.mark.unchecked  # the shape checks break the graph
def test_the_call_compiles_in_one_piece() -> None:
    embedding = PerLayerEmbedding(11, 2, 4, 8, padding_idx=0, placeholder_ids=(4, 5), outside_row=1)
    gate = PerLayerGate(8, 4)
    step = lambda ids, x: gate(x, embedding(ids, x)[:, :, 1])  # noqa: E731
    ids, x = torch.tensor([[3, 4, 20]]), torch.randn(1, 3, 8)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(ids, x), step(ids, x))


def test_explain_prints_the_second_table(tmp_path: Path) -> None:
    config = {**small("gemma3n_text").config.to_dict(), "num_kv_shared_layers": 1}
    sizes = {size.name: size.shape for size in explain(config).tables}
    assert sizes == {"tokens": (61, 24), "per-layer tokens": (53, 18), "per-layer projection": (18, 24)}
    published = {"model_type": "gemma4_text", "num_hidden_layers": 35, "hidden_size": 1536, "vocab_size": 262_144}
    sizes = {size.name: size.shape for size in explain(published).tables}
    assert sizes["per-layer tokens"] == (262_144, 35 * 256)
    without = {size.name for size in explain({**published, "hidden_size_per_layer_input": 0}).tables}
    assert without == {"tokens"}


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_a_gguf_file_has_the_tables_of_its_model(name: str, tmp_path: Path) -> None:
    model = small(name)
    files = pytest.importorskip("tests.gguf_files", exc_type=ImportError)
    model.save_pretrained(tmp_path / "folder")
    file = files.write_per_layer_tables(model, tmp_path / "model.gguf", keys={"tokenizer.ggml.padding_token_id": 3})
    ids = some_ids(torch.float32)
    ours, expected = (InputEmbedding.from_pretrained(each) for each in (file, tmp_path / "folder"))
    hidden = expected(ids)
    assert torch.equal(ours(ids), hidden)
    assert torch.equal(ours.per_layer(ids, hidden), expected.per_layer(ids, hidden))
    alone = PerLayerEmbedding.from_pretrained(file)
    assert torch.equal(alone(ids, hidden), expected.per_layer(ids, hidden))
    part = expected.per_layer(ids, hidden)[:, :, 1]
    gates = [PerLayerGate.from_pretrained(each, 1) for each in (file, tmp_path / "folder")]
    assert torch.equal(gates[0](hidden, part), gates[1](hidden, part))


def test_a_gguf_file_without_a_per_layer_table_has_none(tmp_path: Path) -> None:
    files = pytest.importorskip("tests.gguf_files", exc_type=ImportError)
    config = transformers.AutoConfig.for_model("gemma4_text", **SIZES, **FAMILIES["gemma4_text"])
    config.hidden_size_per_layer_input = 0
    file = files.write_per_layer_tables(transformers.AutoModel.from_config(config), tmp_path / "model.gguf")
    assert InputEmbedding.from_pretrained(file).per_layer is None
    assert not [table for table in explain(load_gguf_config(file)).tables if "per-layer" in table.name]
    with refuses(InputError, "without per-layer embeddings"):
        PerLayerEmbedding.from_pretrained(file)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("padding", ["missing", None, -1, 3])
def test_the_padding_row_is_that_of_transformers(name: str, padding: str | int | None) -> None:
    config = {"model_type": name, **SIZES, **FAMILIES[name], "pad_token_id": padding}
    if padding == "missing":
        del config["pad_token_id"]
    theirs = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        expected = transformers.AutoModel.from_config(theirs).embed_tokens_per_layer.padding_idx
        assert PerLayerEmbedding.from_config(config).padding_idx == expected
        assert PerLayerEmbedding.from_config(theirs).padding_idx == expected


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2},
        {"model_type": "gemma4_text", "hidden_size": 8, "num_hidden_layers": 2, "hidden_size_per_layer_input": 0},
        {"model_type": "gemma4_unified_text", "hidden_size": 8, "num_hidden_layers": 2},
    ],
)
def test_a_model_without_per_layer_embeddings_is_an_error(config: dict[str, Any]) -> None:
    for kind in (PerLayerEmbedding, PerLayerGate):
        with refuses(InputError, config["model_type"], "without per-layer embeddings"):
            kind.from_config(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_activation": "gelu_10"}, ("hidden_activation='gelu_10'",)),
        ({"pad_token_id": 53}, ("pad_token_id=53", "53 rows")),
        ({"num_hidden_layers": None}, ("num_hidden_layers",)),
        ({"hidden_size_per_layer_input": -1}, ("hidden_size_per_layer_input",)),
    ],
)
def test_a_configuration_that_does_not_fit_is_an_error(change: dict[str, Any], words: tuple[str, ...]) -> None:
    config = {"model_type": "gemma3n_text", **SIZES, **FAMILIES["gemma3n_text"], **change}
    with refuses(InputError, *words):
        PerLayerEmbedding.from_config(config)


def test_images_need_a_padding_row() -> None:
    text = {**SIZES, **FAMILIES["gemma4_text"], "model_type": "gemma4_text", "pad_token_id": None}
    with refuses(InputError, "pad_token_id=None", "images"):
        PerLayerEmbedding.from_config({"model_type": "gemma4", "text_config": text, **PLACEHOLDERS})


def test_weights_of_other_sizes_are_an_error(tmp_path: Path) -> None:
    small("gemma4_text").save_pretrained(tmp_path)
    with refuses(RangeError, "layer"):
        PerLayerGate.from_pretrained(tmp_path, 3)
    facts = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**facts, "vocab_size_per_layer_input": 60}), encoding="utf-8")
    with refuses(InputError, "embed_tokens_per_layer.weight", "(60, 18)"):
        PerLayerEmbedding.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_ids_of_few_bits_read_the_rows_of_the_same_numbers(dtype: torch.dtype) -> None:
    """torch compares 64 with 258,880 modulo 256, and -1 of bytes is no row."""
    options: dict[str, Any] = {"num_layers": 2, "width": 3, "d_model": 4}
    ids = torch.tensor([[1, 64, 100, -1 if dtype.is_signed else 99]])
    placeholders = PerLayerEmbedding(300_000, padding_idx=299_999, placeholder_ids=(258_880, 1, 65_600), **options)
    outside = PerLayerEmbedding(258_880, outside_row=258_879, **options)
    for embedding, read in ((placeholders, ids.abs()), (outside, ids)):
        assert torch.equal(embedding.rows(read.to(dtype)), embedding.rows(read))


def test_wrong_calls_are_errors() -> None:
    embedding, gate = PerLayerEmbedding(11, 2, 4, 8), PerLayerGate(8, 4)
    ids, x = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, 8)
    assert embedding([1, 2, 3], x).shape == (1, 3, 2, 4)
    with refuses(RangeError, "id 11 at (0, 2)", "vocab_size=11"):
        embedding(torch.tensor([[1, 2, 11]]), x)
    with refuses(ShapeError, "(1, 2)", "(1, 3)"):
        embedding(ids[:, :2], x)
    with refuses(ShapeError, "hidden", "(batch, seq, 8)"):
        embedding(ids, x[..., :7])
    with refuses(ShapeError, "bfloat16", "float32"):
        embedding(ids, x.bfloat16())
    with refuses(ShapeError, "part", "(1, 3, 4)", "parts[:, :, layer]"):
        gate(x, embedding(ids, x))
    with refuses(InputError, "without a table"):
        PerLayerEmbedding(None, 2, 4, 8).rows(ids)
    with refuses(RangeError, "padding_idx without a table"):
        PerLayerEmbedding(None, 2, 4, 8, padding_idx=0)
    with refuses(RangeError, "placeholder_ids without padding_idx"):
        PerLayerEmbedding(11, 2, 4, 8, placeholder_ids=(4,))
    with refuses(ShapeError, "d_model=8", "d_model=6"):
        InputEmbedding(11, 6, per_layer=embedding)
    with refuses(RangeError, "per_layer"):
        InputEmbedding(11, 6, per_layer=8)  # type: ignore[arg-type]
