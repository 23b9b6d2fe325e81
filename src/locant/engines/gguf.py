"""Read the position encoding that llama.cpp uses for a GGUF file, and compare it with a configuration.

The metadata of a file is incomplete. The code of llama.cpp decides by architecture which dimensions form a pair. The
factors of LongRoPE depend on the allocated context, not on the text. Dynamic scaling has no key. For YaRN, llama.cpp
reads the ends of the ramp only for some architectures, and never reads the rounding of the ramp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from locant.arguments import MAX_INT32, Real, whole
from locant.checkpoints.checkpoint_folder import TensorFolder
from locant.errors import InputError, RangeError
from locant.gguf_file import GgufFile
from locant.kernels.rotary import Layout
from locant.models.config_values import Config
from locant.models.encodings import encoding_from_config, layer_types, rotary_layer_types
from locant.models.registry import with_defaults
from locant.models.rope_parameters import is_per_layer, rope_dictionary
from locant.positions import ALiBi, PositionEncoding, Positions, Rotary
from locant.positions.scaling import DynamicNTK, Linear, LongRoPE, Scaling, YaRN
from locant.spelling import literal, spell

INTERLEAVED = {
    "arcee", "arctic", "baichuan", "bailingmoe", "chameleon", "chatglm", "cohere2", "command-r", "deci", "deepseek",
    "deepseek2", "deepseek2-ocr", "ernie4_5", "ernie4_5-moe", "glm-dsa", "glm4", "granite", "granitehybrid",
    "granitemoe", "internlm2", "llada", "llama", "llama-embed", "llama4", "maincoder", "minicpm", "mistral3",
    "mistral4", "neo-bert", "olmo", "plm", "smollm3", "starcoder", "xverse",
}  # fmt: skip
"""Architectures with pairs (2i, 2i + 1) in llama.cpp, according to ``llama_model_rope_type`` of its library."""

HALF = {
    "afmoe", "apertus", "bailingmoe2", "bert", "bitnet", "codeshell", "cogvlm", "dbrx", "dots1", "dream",
    "eurobert", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma", "gemma-embedding", "gemma2",
    "gemma3", "gemma3n", "gemma4", "glm4moe", "gpt-oss", "gptneox", "grok", "grovemoe", "hunyuan-dense",
    "hunyuan-moe", "hunyuan_vl", "jais2", "jina-bert-v3", "lfm2", "lfm2moe", "llada-moe", "mimo2", "minicpm3",
    "minimax-m2", "modern-bert", "nemotron", "nomic-bert", "nomic-bert-moe", "olmo2", "olmoe", "openelm", "orion",
    "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "qwen", "qwen2", "qwen2moe", "qwen3",
    "qwen3moe", "qwen3next", "rnd1", "seed_oss", "smallthinker", "stablelm", "starcoder2", "step35",
}  # fmt: skip
"""Architectures with pairs (i, i + d/2)."""

SEVERAL_AXES = {
    "paddleocr", "qwen2vl", "qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe",
}  # fmt: skip
"""Architectures with axes for time, rows and columns, and pairs (i, i + d/2). Text has one index on all axes."""

NOT_ROTARY = {
    "arwkv7", "bloom", "gpt2", "jais", "jamba", "jina-bert-v2", "kimi-linear", "mamba", "mamba2", "mpt",
    "nemotron_h", "nemotron_h_moe", "refact", "rwkv6", "rwkv6qwen2", "rwkv7", "t5", "t5encoder", "wavtokenizer-dec",
}  # fmt: skip
"""Architectures without rotary positions."""

LEARNED_TABLES = {"bert", "gpt2", "starcoder", "t5", "t5encoder"}
"""Architectures with a table of positions or biases, even if ``llama_model_rope_type`` returns a rotation."""

ALIBI = {"bloom", "jina-bert-v2", "refact"}
"""Architectures with ALiBi even without a key. Baichuan models with `BAICHUAN_13B` layers have it, too."""

BAICHUAN_13B = 40

UNROTATED = {"cohere2", "exaone4", "exaone-moe", "llama4", "smollm3"}
"""Architectures whose code does not rotate some layers."""

LOCAL_BASE = {"gemma3", "gemma3n", "modern-bert"}
"""Architectures whose layers with a window have the default base, unless a key states another."""

READS_BETAS = {"mistral3"}
"""Architectures for which llama.cpp reads ``yarn_beta_fast`` and ``yarn_beta_slow`` (measured: not Llama or Qwen2)."""

NO_DYNAMIC = "llama.cpp has no dynamic scaling: its angles are not scaled"
ALWAYS_ROUNDED = "llama.cpp always rounds the ends of the ramp to whole pairs"

USE_CONFIG = "use locant.encoding_from_config with the model's config.json"
DEFAULT_BASE = 10_000.0
NUM_COMPARED = 4096
"""The number of positions at which two encodings are compared, spread over the context."""


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """The position encoding that llama.cpp uses with a file.

    Args:
        encoding: the encoding, with pairs in the order of the weights in the file, which may differ from
            `transformers`.
        n_ctx: the allocated context.
        notes: facts that are not in the file, but depend on the code of llama.cpp or on the allocated context.
    """

    architecture: str
    encoding: PositionEncoding
    n_ctx: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GgufComparison:
    """A comparison of a file with a configuration.

    Args:
        cos_sin_error: the largest difference between the cosines and sines of the two encodings, over the context. It
            is infinite if pairs or axes differ, and 0 if an encoding is not rotary.
        differences: sentences about the differences.
        ignored: keys of the configuration that have no effect in llama.cpp with this file, and why.
        weights: whether q and k in the file are equal to q and k in the safetensors, reordered or as they are.
            ``None`` if they were not compared.
    """

    model: GgufModel
    cos_sin_error: float
    differences: tuple[str, ...]
    ignored: Mapping[str, str]
    weights: str | None

    @property
    def agrees(self) -> bool:
        return not self.differences


def encoding_from_gguf(path: Path | str, n_ctx: int | None = None) -> PositionEncoding:
    """Return the position encoding that llama.cpp uses with a GGUF file.

    The encoding has the layout of the weights in the file. The conversion reorders q and k of Llama, so the encoding
    is interleaved here and half in `transformers`.

    Args:
        path: a ``.gguf`` file, or the first of several shards.
        n_ctx: the allocated context (``-c`` of llama.cpp), which decides the factors of LongRoPE. Default: the trained
            length in the file, as in llama.cpp.

    Raises:
        InputError: it is not a GGUF file, or locant has no encoding for its positions.
    """
    return read_gguf(path, n_ctx).encoding


def read_gguf(path: Path | str, n_ctx: int | None = None) -> GgufModel:
    """Return the encoding of a GGUF file, its architecture, and notes on facts that are not in the file."""
    return _model(_Fields(path), n_ctx)


class _Fields(GgufFile):
    """The keys of the architecture of a file."""

    def has(self, key: str) -> bool:
        return self.value(f"{self.architecture}.{key}") is not None

    def text(self, key: str, default: str) -> str:
        return self._text(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Real | None = None, *, low: Real = -math.inf, above: Real = -math.inf) -> Real:
        """Return a number of the architecture, or the largest of a list with one number per layer."""
        ends = [f"of {spell(low)} or more"] * (low > -math.inf) + [f"above {spell(above)}"] * (above > -math.inf)

        def test(each: Real) -> bool:
            return math.isfinite(each) and each >= low and each > above

        return self._largest(key, default, " ".join(["a number", *ends]), test)

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT32) -> int:
        """Return a number of the architecture that is an integer from `low` to `high`. 4096.0 is accepted."""

        def test(each: Real) -> bool:
            return low <= each <= high and each == int(each)

        return int(self._largest(key, default, f"a whole number from {low:,} to {high:,}", test))

    def _largest(self, key: str, default: Real | None, expected: str, test: Callable[[Real], bool]) -> Real:
        key = f"{self.architecture}.{key}"
        value = self.value(key)
        if value is None and default is not None:
            return default
        each: list[Any] = value if isinstance(value, list) else [value]
        are_numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in each)
        largest: Real | None = max(each) if each and are_numbers else None
        if largest is None or not test(largest):
            raise self.wrong(key, value, expected)
        return largest

    def factors(self, name: str, num_pairs: int) -> tuple[float, ...] | None:
        """Return a divisor for each pair, from the tensor with this name.

        A file has one such tensor, or one per layer.
        """
        for tensor in (f"{name}.weight", f"blk.0.{name}.weight"):
            if tensor in self.tensors:
                values = self.dequantise(tensor).ravel()
                if len(values) != num_pairs or not (np.isfinite(values) & (values > 0)).all():
                    raise self.wrong(tensor, values.tolist(), f"{num_pairs} numbers above 0, one for each pair")
                return tuple(values.tolist())
        return None


def _model(fields: _Fields, n_ctx: int | None) -> GgufModel:
    n_ctx = (
        fields.whole("context_length")
        if n_ctx is None
        else whole("n_ctx", n_ctx, 1, MAX_INT32 + 1, remedy="pass the -c of llama.cpp")
    )
    name = fields.architecture
    if name in LEARNED_TABLES or "position_embd.weight" in fields.tensors:
        got = f"got {fields.path} of {name}, whose positions are a table in the file"
        raise InputError(got, USE_CONFIG)
    baichuan_13b = name == "baichuan" and fields.whole("block_count", 1) == BAICHUAN_13B
    try:
        encoding, notes = _without_rotary(fields) if name in NOT_ROTARY or baichuan_13b else _rotary(fields, n_ctx)
    except RangeError as error:  # each value is in its range, but they contradict each other
        got = f"got {fields.path}, whose keys contradict each other: {error.cause}"
        raise InputError(got, USE_CONFIG) from None
    return GgufModel(architecture=fields.architecture, encoding=encoding, n_ctx=n_ctx, notes=tuple(notes))


def _without_rotary(fields: _Fields) -> tuple[PositionEncoding, list[str]]:
    has_slopes = fields.architecture in {*ALIBI, "baichuan"}
    largest = fields.number("attention.max_alibi_bias", 8.0 if has_slopes else 0.0)
    if largest not in (0.0, 8.0):
        got = f"got {fields.path} with attention.max_alibi_bias={largest}, whose slopes differ from the paper"
        raise InputError(got, "ALiBi(num_heads, slopes=...)")
    if not largest:
        return PositionEncoding(), []
    return ALiBi(fields.whole("attention.head_count")), [
        "llama.cpp adds ALiBi in its code, without a key in the file"
    ] * has_slopes


def _rotary(fields: _Fields, n_ctx: int) -> tuple[Rotary, list[str]]:
    notes = [
        f"llama.cpp decides the pairs of dimensions of {fields.architecture} in its code, without a key in the file"
    ]
    layout: Layout = "interleaved" if fields.architecture in INTERLEAVED else "half"
    if fields.architecture not in INTERLEAVED | HALF | SEVERAL_AXES:
        got = f"got {fields.path} of {fields.architecture}, an architecture that locant does not know"
        raise InputError(got, USE_CONFIG)
    if fields.architecture in SEVERAL_AXES:
        notes.append("images and video have axes for time, rows and columns; this is the encoding of text")
    if fields.has("attention.key_length"):
        head_dim = fields.whole("attention.key_length")
    else:
        head_dim = fields.whole("embedding_length") // fields.whole("attention.head_count")
    rotary_dim = fields.whole("rope.dimension_count", head_dim)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        key = f"{fields.architecture}.rope.dimension_count"
        raise fields.wrong(key, rotary_dim, f"an even number of the {head_dim} dimensions of a head")
    if fields.has("attention.kv_lora_rank"):
        head_dim = rotary_dim
        notes.append("this encoding has only the rotated dimensions of multi-head latent attention")
    base = fields.number("rope.freq_base", DEFAULT_BASE, above=0)
    if fields.architecture in UNROTATED:
        notes.append(
            "layers that rotate have this encoding, and the code of the architecture does not rotate some layers"
        )
    if fields.has("rope.freq_base_swa") or fields.architecture in LOCAL_BASE:
        local = fields.number("rope.freq_base_swa", DEFAULT_BASE, above=0)
        base_of_windows = spell(local)
        note = (
            "layers with full attention have this encoding, and layers with a window have the base "
            f"{base_of_windows} and no scaling"
        )
        notes.append(note)
    scaling = _scaling(fields, n_ctx, rotary_dim // 2, notes)
    rotary = Rotary(
        head_dim, base=base, scaling=scaling, layout=layout, rotary_dim=None if rotary_dim == head_dim else rotary_dim
    )
    return (rotary.for_length(n_ctx) if isinstance(scaling, LongRoPE) else rotary), notes


def _scaling(fields: _Fields, n_ctx: int, num_pairs: int, notes: list[str]) -> Scaling | None:
    """Return the scaling of llama.cpp, which divides frequencies by factors and then applies the file's scaling."""
    keys = ("rope.scaling.factor", "rope.scale_linear")
    factor = next(filter(None, (fields.number(key, 0.0, low=0) for key in keys)), 1.0)  # llama.cpp treats 0 as 1
    kind = fields.text("rope.scaling.type", "linear")
    temperature = float(fields.number("rope.scaling.attn_factor", 1.0, above=0))
    trained = fields.whole("rope.scaling.original_context_length", fields.whole("context_length"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        got = f"got {fields.path} with rope.scaling.type={kind!r}, which llama.cpp does not load"
        raise InputError(got, "use none, linear, yarn or longrope")
    kind, factor = ("none", 1.0) if kind == "none" or (kind == "linear" and factor == 1) else (kind, float(factor))
    long, short, plain = (
        fields.factors(name, num_pairs) for name in ("rope_factors_long", "rope_factors_short", "rope_freqs")
    )
    if long and short:
        chosen = "long" if n_ctx > trained else "short"
        notes.append(
            f"the {chosen} factors are used for texts of any length, because a context of {n_ctx:,} is allocated"
        )
    elif plain:
        long = short = plain
    if long and short:
        if kind == "yarn":
            got = f"got {fields.path} with both YaRN and factors for each pair"
            raise InputError(got, USE_CONFIG)
        return LongRoPE(
            short_factor=[factor * each for each in short],
            long_factor=[factor * each for each in long],
            original_max_seq_len=max(trained, 2),
            factor=1.0,
            attention_factor=temperature,
        )
    if kind == "yarn":
        betas = [key for key in ("yarn_beta_fast", "yarn_beta_slow") if fields.has(f"rope.scaling.{key}")]
        ramp: dict[str, Any] = {key[5:]: float(fields.number(f"rope.scaling.{key}", above=0)) for key in betas}
        if ramp and fields.architecture not in READS_BETAS:
            notes.append(
                f"{' and '.join(f'{key}={literal(value)}' for key, value in ramp.items())} are in the file and ignored"
            )
            ramp = {}
        if fields.number("rope.scaling.yarn_log_multiplier", 0.0):
            notes.append("the code of this architecture puts the temperature of YaRN into the scale of the scores")
        return YaRN(
            factor=factor,
            original_max_seq_len=trained,
            attention_factor=None if temperature == 1 else temperature * (1 + 0.1 * math.log(factor)),
            **ramp,
        )
    if temperature != 1:
        got = f"got {fields.path} with rope.scaling.attn_factor={temperature:g} and {kind} scaling"
        raise InputError(got, USE_CONFIG)
    return None if factor == 1 else Linear(factor=factor)  # also for longrope without factors


# ---------------------------------------------------------------------- comparison with a configuration

ROUNDING = 2.0**-23
"""The relative error of frequencies in llama.cpp, which computes angles in float32."""


def compare_gguf(
    path: Path | str, config: Config, *, n_ctx: int | None = None, folder: Path | None = None
) -> GgufComparison:
    """Compare llama.cpp's positions for a file with the positions of `transformers` for a configuration.

    Args:
        config: a Hugging Face configuration.
        n_ctx: the context that llama.cpp allocates. Default: the trained length in the file.
        folder: a folder of safetensors, whose q and k are compared with q and k of the file.

    Raises:
        InputError: the file, the configuration or the folder cannot be read, or locant has no encoding for the
            positions.
    """
    fields = _Fields(path)
    model = _model(fields, n_ctx)
    full = with_defaults(config)
    kinds = rotary_layer_types(full) or layer_types(full) or (None,)
    kind = "full_attention" if "full_attention" in kinds else kinds[0]
    stated = encoding_from_config(full, layer_type=kind)
    ignored = dict(_find_ignored_keys(fields, full, kind))
    if not (isinstance(stated, Rotary) and isinstance(model.encoding, Rotary)):
        same = repr(stated) == repr(model.encoding)
        differences = () if same else (f"the file has {model.encoding}, the configuration {stated}",)
        return GgufComparison(model=model, cos_sin_error=0.0, differences=differences, ignored=ignored, weights=None)
    differences = list(_differences(model.encoding, stated))
    error = math.inf if differences else _cos_sin_error(model.encoding, stated, model.n_ctx)
    if model.n_ctx * ROUNDING + 1e-6 < error < math.inf:
        differences.append(f"cosines and sines differ by up to {spell(error, 2)} within {model.n_ctx:,} positions")
    if isinstance(stated.scaling, LongRoPE) and model.n_ctx > (trained := stated.scaling.original_max_seq_len):
        differences.append(
            f"texts of up to {trained:,} tokens get the long factors in llama.cpp, because {model.n_ctx:,} are "
            f"allocated, but the short ones in transformers: start llama.cpp with -c {trained} for these texts"
        )
    reordered = stated.layout != model.encoding.layout
    weights = None if folder is None else _weights(fields, TensorFolder(folder), reordered=reordered)
    if weights is not None and weights.startswith("wrong"):
        differences.append(f"q and k are {weights}")
    return GgufComparison(
        model=model, cos_sin_error=error, differences=tuple(differences), ignored=ignored, weights=weights
    )


def _differences(in_file: Rotary, in_config: Rotary) -> Iterator[str]:
    """Yield the differences that make it impossible to compare angles."""
    for name in ("head_dim", "rotary_dim"):
        file_size, config_size = getattr(in_file, name), getattr(in_config, name)
        if file_size != config_size:
            yield f"{name} is {file_size} in the file and {config_size} in the configuration"


def _cos_sin_error(in_file: Rotary, in_config: Rotary, n_ctx: int) -> float:
    """Return the largest error at positions spread over the context, for a text that fills it."""
    if in_config.scaling.length_threshold is not None:
        in_config = in_config.for_length(n_ctx)
    positions = Positions.of(sorted({*np.linspace(0, n_ctx - 1, NUM_COMPARED).astype(int).tolist()}))
    if in_config.sections is not None:
        in_config = in_config.replace(sections=None, axial=False)  # text has one index on all axes
    pairs = zip(in_file.cos_sin(positions), in_config.cos_sin(positions), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def _find_ignored_keys(fields: _Fields, config: Config, kind: str | None) -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration that llama.cpp does not support, and why."""
    rope = rope_dictionary(config)
    if is_per_layer(rope):
        rope = rope.get(str(kind)) or {}
    for key, value in rope.items():
        if key in ("rope_type", "type") and value == DynamicNTK.info.rope_type:
            yield key, NO_DYNAMIC
        elif key in ("beta_fast", "beta_slow") and value not in (None, getattr(YaRN, key)):
            if fields.architecture not in READS_BETAS:
                option = f"--yarn-{key.replace('_', '-')} {value:g}"
                yield key, f"llama.cpp does not read it from a file of {fields.architecture}: start it with {option}"
        elif key == "truncate" and value is False:
            yield key, ALWAYS_ROUNDED


def _weights(fields: _Fields, folder: TensorFolder, *, reordered: bool) -> str | None:
    """Return the order of q and k of the first layer, and whether it is wrong for the pairs of llama.cpp.

    Return ``None`` if they are not found.
    """
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    answers = set[str]()
    for (name, count), module in zip(heads.items(), ("q_proj", "k_proj"), strict=True):
        in_file, in_folder = f"blk.0.{name}.weight", folder.find(f"layers.0.self_attn.{module}")
        if in_file not in fields.tensors or in_folder is None:
            return None
        plain = folder.tensor(in_folder).float().numpy()
        weight = fields.dequantise(in_file)
        num_heads = fields.whole(count, fields.whole("attention.head_count"))
        if weight.size != plain.size or len(plain) % (2 * num_heads):
            answers.add("of another size")
            continue
        weight = weight.reshape(plain.shape)
        halves = plain.reshape(num_heads, 2, -1, plain.shape[-1])
        interleaved = halves.swapaxes(1, 2).reshape(plain.shape)
        errors = {"as they are": np.abs(weight - plain).mean(), "reordered": np.abs(weight - interleaved).mean()}
        nearest = min(errors, key=lambda order: errors[order])
        answers.add(nearest if 2 * errors[nearest] < max(errors.values()) else "other weights")
    expected = "reordered" if reordered else "as they are"
    return expected if answers == {expected} else f"wrong: {' and '.join(sorted(answers))}, expected {expected}"
