"""The encoding of a GGUF file agrees with what the real llama.cpp computes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import PreTrainedModel

import locant
from locant import ALiBi, InputError, PositionEncoding, Rotary, encoding_from_gguf
from locant.cli import main
from locant.engines.gguf import HALF, INTERLEAVED, NOT_ROTARY, SEVERAL_AXES, compare_gguf, read_gguf
from tests.engines.llama_cpp import LlamaCpp, rope_type
from tests.engines.record import record
from tests.gguf_files import CONTEXT, TRAINED, add_tokenizer, gguf, scaled_model, write_gguf
from tests.refusal import refuses
from tests.tolerances import LLAMA_CPP

IDS = torch.randint(3, 300, (1, 100), generator=torch.Generator().manual_seed(1))

FILES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "default", {}, {}),
    ("llama", "linear", {}, {}),
    ("llama", "yarn", {}, {}),
    ("llama", "llama3", {}, {}),
    ("llama", "longrope", {}, {}),
    ("llama", "dynamic", {}, {}),
    ("llama", "yarn", {"beta_fast": 16.0, "beta_slow": 2.0}, {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}),
    ("llama", "yarn", {"truncate": False}, {}),
    ("llama", "yarn", {"attention_factor": 1.0}, {}),
    ("llama", "yarn", {"attention_factor": 1.0}, {"attn_factor": 1 / (1 + 0.1 * float(np.log(4)))}),
    ("qwen2", "default", {}, {}),
    ("qwen2", "linear", {}, {}),
    ("qwen2", "yarn", {}, {}),
    ("qwen2", "yarn", {"beta_fast": 16.0, "beta_slow": 2.0}, {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}),
    ("gpt_neox", "default", {}, {}),
    ("gpt_neox", "linear", {}, {}),
    ("phi3", "default", {}, {}),
    ("phi3", "longrope", {}, {}),
]
"""Architecture, scaling, options of it in the configuration, and keys of the file that say them."""


DIFFERENT = {
    "dynamic": "dynamic scaling",
    "beta_fast": "`beta_fast`, `beta_slow` of YaRN (Llama, Qwen2)",
    "truncate": "`truncate` of YaRN",
    "attention_factor": "`attention_factor` of YaRN without `attn_factor`",
}
"""Configurations that llama.cpp computes differently: rows of docs/guides/engines.md."""


def _record(subject: str, difference: float) -> None:
    record("llama.cpp", subject, float(difference), package="xllamacpp", unit="logits from transformers")


def _named(case: Any) -> str:
    return "-".join(f"{part}" for part in case) if isinstance(case, tuple) else str(case)


def _logits(model: PreTrainedModel, encoding: PositionEncoding, ids: torch.Tensor) -> np.ndarray:
    """Of the model of `transformers` with an encoding in the place of its own, whose pairs are those of its weights."""
    own = Rotary.from_config(model.config)
    assert isinstance(encoding, Rotary)
    with torch.no_grad(), locant.swap(model, encoding.replace(layout=own.layout, angles="float32")):
        return model(ids).logits[0].numpy()


@pytest.mark.parametrize("case", FILES, ids=_named)
def test_llama_cpp_computes_the_encoding_of_a_file(
    case: tuple[str, str, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    kind, rope_type, rope, keys = case
    model = scaled_model(kind, rope_type, **rope)
    path = write_gguf(model, tmp_path / "a.gguf", scaling_keys=keys)
    encoding = encoding_from_gguf(path, n_ctx=CONTEXT)
    with LlamaCpp(path, CONTEXT) as llama:
        theirs = llama.logits(IDS[0].tolist())
    told = np.abs(theirs - _logits(model, encoding, IDS)).max()
    record("llama.cpp", "logits by what `encoding_from_gguf` tells", float(told), package="xllamacpp")
    assert told < LLAMA_CPP
    comparison = compare_gguf(path, model.config.to_dict(), n_ctx=CONTEXT)
    with torch.no_grad():
        off = np.abs(theirs - model(IDS).logits[0].numpy()).max()
    if off >= LLAMA_CPP:
        _record(next(DIFFERENT[name] for name in (rope_type, *rope) if name in DIFFERENT), off)
    elif kind != "gpt_neox":  # whose GELU is looked up in float16
        _record("plain, linear, YaRN, Llama 3", off)
    if rope_type == "longrope":  # which differs for short texts alone
        assert off < LLAMA_CPP
        assert len(comparison.differences) == 1
    else:
        assert comparison.agrees == (off < LLAMA_CPP), f"{off} off, and told is {comparison.differences}"


def test_long_rope_follows_the_allocated_context(tmp_path: Path) -> None:
    model = scaled_model("llama", "longrope")
    path = write_gguf(model, tmp_path / "a.gguf")
    ids = IDS[:, : TRAINED - 10]
    with LlamaCpp(path, CONTEXT) as llama:
        theirs = llama.logits(ids[0].tolist())
    assert np.abs(theirs - _logits(model, encoding_from_gguf(path, CONTEXT), ids)).max() < LLAMA_CPP
    with torch.no_grad():
        off = np.abs(theirs - model(ids).logits[0].numpy()).max()
    _record("LongRoPE, texts below the trained length", off)
    assert off > 1, "transformers takes the short factors"
    assert "the short factors" in " ".join(read_gguf(path, n_ctx=TRAINED).notes)


def test_far_positions_move_logits_but_not_those_of_exact_angles(tmp_path: Path) -> None:
    far = 1_000_000
    model = scaled_model("llama", "default")
    places = torch.arange(IDS.shape[1])[None]
    with LlamaCpp(write_gguf(model, tmp_path / "a.gguf"), CONTEXT) as llama:
        near, moved = (llama.logits(IDS[0].tolist(), start) for start in (0, far))
    subject, unit = "all positions + 1,000,000", "logits moved"
    record("llama.cpp", subject, by_llama := float(np.abs(moved - near).max()), package="xllamacpp", unit=unit)
    by = []
    with torch.no_grad():
        for swapped in (False, True):
            with locant.swap(model, angles="exact") if swapped else nullcontext():
                near, moved = (model(IDS, position_ids=places + start).logits for start in (0, far))
            by.append(float((moved - near).abs().max()))
    record("transformers", subject, by[0], package="transformers", unit=unit)
    record("transformers", f"{subject}, swapped", by[1], package="transformers", unit=unit)
    assert min(by_llama, by[0]) > 0.1
    assert by[1] < LLAMA_CPP / 100


def test_ends_of_the_ramp_are_read_where_they_are(tmp_path: Path) -> None:
    betas = {"beta_fast": 16.0, "beta_slow": 2.0}
    keys = {f"yarn_{name}": value for name, value in betas.items()}
    model = scaled_model("llama", "yarn", **betas)
    path = write_gguf(model, tmp_path / "a.gguf", scaling_keys=keys, architecture="mistral3")
    with LlamaCpp(path, CONTEXT) as llama, torch.no_grad():
        assert np.abs(llama.logits(IDS[0].tolist()) - model(IDS).logits[0].numpy()).max() < LLAMA_CPP
    assert compare_gguf(path, model.config.to_dict()).agrees


@pytest.mark.parametrize(
    ("rope_type", "rope", "key"),
    [
        ("dynamic", {}, "rope_type"),
        ("yarn", {"beta_fast": 16.0}, "beta_fast"),
        ("yarn", {"truncate": False}, "truncate"),
    ],
)
def test_keys_without_a_counterpart_are_named(rope_type: str, rope: dict[str, Any], key: str, tmp_path: Path) -> None:
    model = scaled_model("llama", rope_type)
    path = write_gguf(model, tmp_path / "a.gguf")
    config = model.config.to_dict()
    config["rope_parameters"] |= rope
    assert [*compare_gguf(path, config, n_ctx=CONTEXT).ignored] == [key]
    plain = scaled_model("llama", "default")
    assert not compare_gguf(write_gguf(plain, tmp_path / "b.gguf"), plain.config.to_dict()).ignored


@pytest.mark.parametrize(("reordered", "answer"), [(True, "reordered"), (False, "wrong: as they are")])
def test_q_and_k_in_the_wrong_order_are_found(reordered: bool, answer: str, tmp_path: Path) -> None:
    model = scaled_model("llama", "default")
    model.save_pretrained(tmp_path / "model")
    path = write_gguf(model, tmp_path / "a.gguf", reordered=reordered)
    with LlamaCpp(path, CONTEXT) as llama, torch.no_grad():
        off = np.abs(llama.logits(IDS[0].tolist()) - model(IDS).logits[0].numpy()).max()
    if not reordered:
        _record("q and k of Llama not reordered", off)
    comparison = compare_gguf(path, model.config.to_dict(), folder=tmp_path / "model")
    assert comparison.weights is not None
    assert comparison.weights.startswith(answer)
    assert comparison.agrees == (off < LLAMA_CPP)
    result = CliRunner().invoke(main, ["explain", str(path), "--against", str(tmp_path / "model"), "--json"])
    assert result.exit_code == (0 if reordered else 1)
    assert json.loads(result.stdout)["agrees"] == reordered


def _metadata(path: Path, architecture: str, **keys: Any) -> Path:
    """A file without weights."""
    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer)
    writer.add_vocab_size(300)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    if "block_count" not in keys:
        writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        add: Any = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_pairs_of_every_architecture_are_those_of_the_library(tmp_path: Path) -> None:
    ours = {
        **dict.fromkeys(INTERLEAVED, "interleaved"), **dict.fromkeys(HALF, "half"),
        **dict.fromkeys(SEVERAL_AXES, "several axes"), **dict.fromkeys(NOT_ROTARY, "none"),
    }  # fmt: skip
    names = sorted(gguf.MODEL_ARCH_NAMES.values())
    theirs = {name: rope_type(_metadata(tmp_path / f"{name}.gguf", name)) for name in names}
    assert {name: kind for name, kind in theirs.items() if kind is not None} == ours


def test_encodings_other_than_rotary(tmp_path: Path) -> None:
    keys: dict[str, dict[str, Any]] = {
        "mpt": {"attention.max_alibi_bias": 8.0}, "bloom": {}, "jina-bert-v2": {}, "baichuan": {"block_count": 40},
    }  # fmt: skip
    for name, more in keys.items():
        assert repr(encoding_from_gguf(_metadata(tmp_path / f"{name}.gguf", name, **more))) == repr(ALiBi(4))
    assert encoding_from_gguf(_metadata(tmp_path / "b.gguf", "baichuan")).methods()[0] == "rotate"
    assert not encoding_from_gguf(_metadata(tmp_path / "mamba.gguf", "mamba")).methods()
    for name in ("gpt2", "t5", "bert", "starcoder"):
        with refuses(InputError, name, "encoding_from_config"):
            encoding_from_gguf(_metadata(tmp_path / f"{name}.gguf", name))


def test_layers_without_rotation_are_not_a_difference(tmp_path: Path) -> None:
    path = _metadata(tmp_path / "a.gguf", "cohere2")
    config = {
        "model_type": "cohere2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 256,
    }  # fmt: skip
    comparison = compare_gguf(path, config)
    assert comparison.agrees, comparison.differences
    assert any("does not rotate" in note for note in comparison.model.notes)


def test_a_type_without_its_factors(tmp_path: Path) -> None:
    """llama.cpp divides positions by the factor all the same."""
    model = scaled_model("llama", "linear")
    path = write_gguf(model, tmp_path / "a.gguf", scaling_type="longrope")
    with LlamaCpp(path, CONTEXT) as llama:
        theirs = llama.logits(IDS[0].tolist())
    assert np.abs(theirs - _logits(model, encoding_from_gguf(path), IDS)).max() < LLAMA_CPP
    with refuses(InputError, "rope.scaling.type"):
        encoding_from_gguf(_metadata(tmp_path / "b.gguf", "llama", **{"rope.scaling.type": "foo"}))


def test_damaged_files_raise(tmp_path: Path) -> None:
    path = write_gguf(scaled_model("llama", "default"), tmp_path / "a.gguf")
    content = path.read_bytes()
    for length in (0, 3, 4, 20, 24, 100, 1000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with refuses(InputError, "a.gguf"):
            encoding_from_gguf(path)
    for wrong in (tmp_path / "nothing.gguf", tmp_path):
        with refuses(InputError, "no file"):
            encoding_from_gguf(wrong)
    with refuses(InputError, "unheard_of"):
        encoding_from_gguf(_metadata(tmp_path / "b.gguf", "unheard_of"))
    with refuses(InputError, "freq_base"):
        encoding_from_gguf(_metadata(tmp_path / "c.gguf", "llama", **{"rope.freq_base": float("nan")}))


ARCHITECTURES = ["llama", "mistral3", "phi3", "gemma3", "deepseek2", "qwen2vl", "baichuan", "bloom", "mpt", "cohere2"]
BASE_KEYS = {"context_length": 256, "embedding_length": 64, "attention.head_count": 4, "block_count": 2}
READ_KEYS = [
    *BASE_KEYS, "attention.key_length", "attention.kv_lora_rank", "attention.max_alibi_bias", "rope.dimension_count",
    "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", *(
        f"rope.scaling.{key}"
        for key in ("type", "factor", "attn_factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow",
                    "yarn_log_multiplier")
    ),
]  # fmt: skip
"""Every key that is read of a file."""

KINDS: dict[str, tuple[Any, Any]] = {
    "UINT32": ("UINT32", st.integers(0, 2**32 - 1)),
    "INT32": ("INT32", st.integers(-(2**31), 2**31 - 1)),
    "UINT64": ("UINT64", st.integers(0, 2**64 - 1)),
    "small": ("INT32", st.integers(-2, 130)),
    "FLOAT32": ("FLOAT32", st.floats(width=32)),
    "BOOL": ("BOOL", st.booleans()),
    "STRING": ("STRING", st.sampled_from(["", "yarn", "linear", "longrope", "none", "4", "x" * 1000, "\u00e9"])),
}
SCALARS = st.sampled_from([*KINDS]).flatmap(lambda kind: st.tuples(st.just(KINDS[kind][0]), KINDS[kind][1]))
LISTS = st.one_of(
    *(st.lists(values, max_size=3) for values in (KINDS["small"][1], KINDS["FLOAT32"][1], KINDS["STRING"][1]))
)
VALUES = st.one_of(st.none(), SCALARS, st.tuples(st.just("ARRAY"), LISTS))


def _write_keys(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, (kind, value) in keys.items():
        if kind == "ARRAY":
            writer.add_array(f"{architecture}.{key}", value)
        else:
            writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType[kind])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_read_or_refused(path: Path) -> bool:
    """Whether it is read; if not, an `InputError` names the file and says what to do."""
    refusal = None
    try:
        read_gguf(path)
    except InputError as error:
        refusal = error
    assert refusal is None or (str(path) in refusal.cause and refusal.remedy)
    return refusal is None


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "a.gguf"


@given(
    architecture=st.sampled_from(ARCHITECTURES),
    changed=st.dictionaries(st.sampled_from(READ_KEYS), VALUES, min_size=1, max_size=3),
    factors=st.none() | arrays(np.float32, st.integers(1, 9)) | arrays(np.int32, 8),
)
def test_a_key_of_any_type_and_value_is_read_or_raises(
    one_file: Path, architecture: str, changed: dict[str, Any], factors: np.ndarray | None
) -> None:
    keys = {**{key: ("UINT32", value) for key, value in BASE_KEYS.items()}, **changed}
    tensors = {} if factors is None else {"rope_freqs.weight": factors}
    one_file.unlink(missing_ok=True)
    _write_keys(one_file, architecture, {key: value for key, value in keys.items() if value is not None}, tensors)
    _is_read_or_refused(one_file)


@given(data=st.data())
def test_a_file_with_other_bytes_is_read_or_raises(one_file: Path, data: st.DataObject) -> None:
    one_file.unlink(missing_ok=True)
    keys = {key: ("UINT32", value) for key, value in BASE_KEYS.items()}
    _write_keys(one_file, "llama", {**keys, "rope.scaling.type": ("STRING", "yarn")}, {"a": np.ones(8, np.float32)})
    assert _is_read_or_refused(one_file)
    content = bytearray(one_file.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    one_file.unlink()  # the reader has mapped it
    one_file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    _is_read_or_refused(one_file)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention.head_count", "four", "a whole number"),
        ("attention.key_length", "z", "a whole number"),
        ("rope.dimension_count", 7, "an even number of the 16 dimensions"),
        ("rope.scaling.attn_factor", "a", "a number above 0"),
        ("rope.scaling.type", 4, "a name"),
        ("context_length", 0, "from 1 to"),
    ],
)
def test_an_error_names_the_key_its_value_and_what_is_expected(
    key: str, value: Any, expected: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {name: ("UINT32", number) for name, number in BASE_KEYS.items()}
    keys[key] = ("STRING" if isinstance(value, str) else "UINT32", value)
    _write_keys(tmp_path / "a.gguf", "llama", keys, {})
    with refuses(InputError, f"llama.{key}={value!r}", expected):
        read_gguf(tmp_path / "a.gguf")
