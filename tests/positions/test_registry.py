"""Encodings by name: this package's own, registered ones, and those of installed packages."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor

import locant
from locant import ALiBi, InputError, LocantError, PositionEncoding, Positions, RangeError, Rotary, encoding
from locant.positions import EncodingInfo, ModelShape, registry
from locant.positions.base import build
from locant.positions.registry import LISTING_ORDER, SCALINGS, broken_encodings, encodings, find
from locant.registry import Registry
from tests.refusal import refuses

SHAPE = ModelShape(d_model=24, num_heads=3, max_seq_len=17)


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry that the other tests do not see."""
    old = registry.ENCODINGS
    fresh = Registry(old.kind, old.group, old._check, registry._register_built_in, old._aliases_of)
    monkeypatch.setattr(registry, "ENCODINGS", fresh)
    monkeypatch.setattr("locant.registry.LOADED", [])
    return


class Even(PositionEncoding):
    """Adds one to every other token."""

    info = EncodingInfo(aliases=("every_other",))

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        return x + (positions.index % 2)[..., None]


class Wide(PositionEncoding):
    """Requires a size that no model has."""

    def __init__(self, num_widgets: int, head_dim: int) -> None:
        super().__init__()


class WideForAModel(Wide):
    @classmethod
    def for_model(cls, shape: ModelShape, **options: object) -> WideForAModel:
        return cls(shape.num_heads, shape.head_dim)


def test_every_file_of_the_package_holds_encodings_that_are_found() -> None:
    files = {path.stem for path in Path(registry.package.__file__).parent.glob("*.py")} - {"__init__"}
    assert {kind.__module__.rsplit(".", 1)[-1] for kind in encodings().values()} == files | {"base"}
    assert list(encodings())[: len(LISTING_ORDER)] == list(LISTING_ORDER)


@pytest.mark.parametrize("name", encodings())
def test_every_encoding_has_complete_info_and_is_built_for_a_model(name: str) -> None:
    kind = find(name)
    info = kind.info
    said = (info.kind, info.parameters, info.cost_of_tokens, info.cost_of_pairs, info.extrapolation, info.used_by)
    assert info.name == name
    assert all((*said, info.paper))
    assert info.kind != "absolute" or kind.methods() == ("embed",) or name == "fope", "no rotation, but a mixture"
    assert type(kind.for_model(SHAPE)) is kind
    assert bool(list(kind.for_model(SHAPE).parameters())) == (info.parameters != "none")
    built = kind.for_model(SHAPE)
    assert type(encoding(name, **{size: getattr(built, size) for size in kind.sizes()})) is kind
    for alias in info.aliases:
        assert find(alias) is kind


def test_info_is_not_inherited() -> None:
    class Steep(ALiBi):
        pass

    assert Steep.info == EncodingInfo()
    assert Steep.methods() == ("bias",)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("RoPE", "rotary"), ("rope", "rotary"), ("absolute", "learned"), ("relative", "t5"), ("sin", "sinusoidal"),
        ("rel_pos", "t5"), ("ALiBi", "alibi"), ("none", "nope"), ("Transformer-XL", "transformer_xl"),
        ("xl", "transformer_xl"), ("t5_bias", "t5"), ("disentangled", "deberta"), ("sinusoid", "sinusoidal"),
        ("RoPE++", "rope_plus_plus"), ("RoPE-Mixed", "rope_mixed"), ("GRAPE-M", "rope_mixed"),
        ("MHRoPE", "rotary_by_head"), ("RoFormer", "rotary"), ("learnable", "learned"),
    ],
)  # fmt: skip
def test_names_of_the_field_are_known(alias: str, name: str) -> None:
    assert find(alias) is find(name)


@pytest.mark.parametrize(
    ("phrase", "name"),
    [
        ("sinusoidal positional encoding", "sinusoidal"), ("Sinusoidal PE", "sinusoidal"),
        ("learned positional embedding", "learned"), ("trainable position embeddings", "learned"),
        ("absolute positional embedding", "learned"), ("ALiBiPositionalBias", "alibi"),
        ("Attention with Linear Biases", "alibi"), ("rotary position embedding", "rotary"),
        ("Rotary Positional Embeddings (RoPE)", "rotary"), ("RotaryEmbedding", "rotary"),
        ("T5RelativePositionBias", "t5"), ("contextual position encoding", "cope"), ("no positional encoding", "nope"),
        ("Functional Interpolation for Relative Positional Encoding", "fire"), ("disentangled attention", "deberta"),
        ("Self-Attention with Relative Position Representations", "shaw"),
        ("RelativePositionBias", "t5"), ("rope.py", "rotary"), ("rotary_embedding.py", "rotary"),
        ("RotaryEmbeddingTorch", "rotary"), ("apply_rotary_pos_emb", "rotary"), ("build_alibi_tensor", "alibi"),
        ("M2M100SinusoidalPositionalEmbedding", "sinusoidal"), ("position_embedding_type=absolute", "learned"),
        ("Wav2Vec2PositionalConvEmbedding", "convolutional"), ("rope scaling", "rotary"),
        ("LengthExtrapolatable", "xpos"), ("ALiBi position embeddings", "alibi"),
    ],
)  # fmt: skip
def test_a_title_finds_its_encoding(phrase: str, name: str) -> None:
    assert find(phrase) is find(name)


@pytest.mark.parametrize(
    ("phrase", "words"),
    [
        ("positional encoding", ("several", "'sinusoidal'", "'learned'")),
        ("relative position embeddings", ("several", "'t5'", "'shaw'", "'transformer_xl'")),
        ("linear scaling", ("a scaling of rotary", "locant.scaling.Linear")),
        ("NTK-aware", ("a scaling of rotary", "locant.scaling.NTK")),
        ("position interpolation", ("a scaling of rotary", "locant.scaling.Linear")),
        ("LlamaDynamicNTKScalingRotaryEmbedding", ("a scaling of rotary", "locant.scaling.DynamicNTK")),
        ("DeepseekV2YarnRotaryEmbedding", ("a scaling of rotary", "locant.scaling.YaRN")),
        ("DynamicPositionBias", ("expected one of",)),
        ("LlamaRotaryEmbedding", ("a model whose positions are rotary", "encoding('rotary'")),
        ("OPTLearnedPositionalEmbedding", ("a model whose positions are learned", "encoding('learned'")),
        ("M-RoPE", ("several position axes", "sections=(16, 24, 24)")),
        ("2D RoPE", ("several position axes", "axial=True")),
        ("2D sinusoidal", ("expected one of",)),
        ("ScaledSinusoidalEmbedding", ("sinusoidal with 'scaled'",)),
        ("TimestepSinusoidal", ("sinusoidal with 'timestep'",)),
        ("BERT", ("a model whose positions are learned", "encoding('learned'")),
        ("GPT-2", ("a model whose positions are learned", "encoding('learned'")),
        ("LLaMA", ("a model whose positions are rotary", "encoding('rotary'")),
        ("BLOOM", ("a model whose positions are alibi", "encoding('alibi'")),
        ("Gemma 3", ("a model whose positions are rotary", "encoding('rotary'")),
        ("bert-base-uncased", ("a model whose positions are learned", "encoding('learned'")),
        ("CLIP", ("a model whose positions are learned", "encoding('learned'")),
        ("openai/whisper-tiny", ("a model whose positions are sinusoidal or learned", "encoding('sinusoidal'")),
        ("meta-llama/Llama-3.1-8B", ("a model whose positions are rotary", "encoding('rotary'")),
        ("microsoft/deberta-v3-base", ("a model whose positions are deberta", "encoding('deberta'")),
        ("tiiuae/falcon-7b", ("a model whose positions depend on its configuration", "encoding_from_config")),
    ],
)
def test_an_ambiguous_name_lists_the_possible_encodings(phrase: str, words: tuple[str, ...]) -> None:
    with refuses(RangeError, repr(phrase), *words):
        encoding(phrase)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RoPE", "locant.Rotary"),
        ("YaRN", "locant.scaling.YaRN"),
        ("T5RelativePositionBias", "locant.T5Bias"),
        ("PositionalEncoding", "locant.Sinusoidal or locant.Learned"),
    ],
)
def test_a_class_name_of_another_package_suggests_ours(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no {name}; use {meant}"):
        getattr(locant, name)
    with pytest.raises(AttributeError):
        locant.Nothing  # noqa: B018  # what it does is raise


@pytest.mark.parametrize(
    ("name", "meant"),
    [("Yarn", "locant.scaling.YaRN"), ("NTKAware", "locant.scaling.NTK"), ("RoPE", "locant.Rotary")],
)
def test_a_scaling_name_of_another_package_suggests_ours(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"^locant.scaling has no {name}; use {meant}$"):
        getattr(locant.scaling, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        locant.scaling.Nothing  # noqa: B018  # what it does is raise


def test_sizes_and_options_reach_the_encoding() -> None:
    assert find("rotary").for_model(SHAPE, base=5e5).head_dim == 8
    assert find("learned").for_model(SHAPE).weight.shape == (17, 24)
    wide = dataclasses.replace(SHAPE, head_dim=10)  # heads that do not share d_model
    assert {getattr(find(name).for_model(wide), "head_dim", 10) for name in encodings()} == {10}
    assert find("t5").for_model(SHAPE, bidirectional=True).num_heads == 3
    grouped = ModelShape(d_model=24, num_heads=4, num_kv_heads=2, max_seq_len=17)
    assert [find(name).for_model(grouped).num_heads for name in ("alibi", "pope", "fope")] == [4, 2, 2]
    rotary = encoding("rotary", head_dim=8, base=5e5, layout="interleaved", rotary_dim=4, angles="float32")
    assert (rotary.base, rotary.layout, rotary.rotary_dim, rotary.angles.mode) == (5e5, "interleaved", 4, "float32")


@pytest.mark.parametrize(("wrong", "meant"), [("rotery", "rotary"), ("learn", "learned"), ("t55", "t5")])
def test_a_misspelt_name_gets_the_nearest(wrong: str, meant: str) -> None:
    with refuses(RangeError, f"{wrong!r}", f"try: {meant!r}"):
        encoding(wrong)


@pytest.mark.parametrize("name", [None, 3, b"rotary", "zzzz", ""])
def test_an_unknown_name_gets_the_list(name: object) -> None:
    with refuses(RangeError, f"got encoding {name!r}", "nope, learned"):
        encoding(name)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_name_of_a_scaling_suggests_a_rotary_encoding_with_it(name: str) -> None:
    with pytest.raises(RangeError, match=f"'{name}', which is a scaling of rotary") as caught:
        encoding(name)
    if "..." not in caught.value.remedy:
        assert isinstance(eval(caught.value.remedy, {"locant": locant}), Rotary)  # noqa: S307  # our own text


@pytest.mark.parametrize("name", encodings())
def test_an_unknown_option_and_a_missing_size_are_named(name: str) -> None:
    built = find(name).for_model(SHAPE)
    sizes = {size: getattr(built, size) for size in find(name).sizes()}
    with refuses(RangeError, "thetta=1", find(name).__name__):
        encoding(name, **sizes, thetta=1)
    with refuses(RangeError, "thetta=1", find(name).__name__):
        find(name).for_model(SHAPE, thetta=1)
    if sizes:
        with refuses(RangeError, next(iter(sizes)), f"locant.encoding({name!r}, "):
            encoding(name)


@pytest.mark.parametrize("name", [name for name, kind in encodings().items() if len(kind.sizes()) > 1])
def test_a_constructor_with_too_few_sizes_names_those_that_are_missing(name: str) -> None:
    kind = find(name)
    first, *others = kind.sizes()
    call = f"try: {kind.__name__}({', '.join(f'{size}=...' for size in kind.sizes())})"
    with refuses(RangeError, f"got no {' or '.join(others)} for {kind.__name__}, which takes {first}, ", call):
        kind(64)
    with refuses(RangeError, f"got no {first} for {kind.__name__}", call):
        kind(**dict.fromkeys(others, 64))


def test_options_of_a_subclass_are_checked_and_copying_needs_none() -> None:
    with refuses(RangeError, "got no head_dim for Wide, which takes num_widgets, head_dim", "Wide(num_widgets=..."):
        Wide(3)  # type: ignore[call-arg]
    whole = locant.Learned(max_seq_len=4, d_model=8)
    assert copy.deepcopy(whole).weight.equal(whole.weight)

    class Free(PositionEncoding):
        def __init__(self, *sizes: int) -> None:
            super().__init__()

    assert type(Free(1, 2)) is type(build(Free, {})) is Free


@pytest.mark.parametrize("name", encodings())
def test_no_number_is_taken_for_a_base(name: str) -> None:
    """Tutorials write a length second: ``Rotary(64, 512)`` would be base 512."""
    in_order = [
        each
        for each in inspect.signature(find(name).__init__).parameters.values()
        if each.kind is not each.KEYWORD_ONLY
    ]
    assert "base" not in [each.name for each in in_order]


def test_argument_names_of_other_packages_suggest_ours() -> None:
    with refuses(RangeError, "got 512 without a name for Rotary", "Rotary(64), which needs no length"):
        Rotary(64, 512)
    with refuses(RangeError, "got max_seq_len=512 for Rotary", "needs no length"):
        Rotary(64, max_seq_len=512)
    with refuses(RangeError, "got d_model=512 for Rotary", "head_dim", "d_model // num_heads"):
        Rotary(d_model=512)
    with refuses(RangeError, "got theta=500.0 for Rotary", "base=500.0"):
        Rotary(64, theta=500.0)
    with refuses(RangeError, "got 1024 without a name for ALiBi", "ALiBi(8), which needs no length"):
        ALiBi(8, 1024)
    with refuses(RangeError, "got max_len=5 for Learned", "max_seq_len=5"):
        locant.Learned(d_model=8, max_len=5)
    with refuses(LocantError, "got bias(6) without keys", "encoding.matrix(6)"):
        ALiBi(4).bias(6)


@pytest.mark.usefixtures("_fresh")
def test_a_registered_encoding_is_found_and_listed_after_this_packages_own() -> None:
    before = [*encodings()]
    locant.register_encoding("even", Even, aliases=["odd"])
    assert [*encodings()] == [*before, "even"]
    assert find("every-other") is find("Odd") is Even
    assert encoding("even").embed(torch.zeros(1, 3, 1), Positions.arange(3)).flatten().tolist() == [0, 1, 0]
    assert isinstance(Even.for_model(SHAPE), Even)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("value", [3, Even(), object, "alibi"])
def test_only_encoding_classes_can_be_registered(value: object) -> None:
    with refuses(RangeError, "'mine'", "PositionEncoding"):
        locant.register_encoding("mine", value)
    assert "mine" not in encodings()


@pytest.mark.usefixtures("_fresh")
def test_a_name_is_not_taken_twice() -> None:
    with refuses(RangeError, "'alibi'", "another name"):
        locant.register_encoding("alibi", Even)
    with refuses(RangeError, "'rope'", "another name"):
        locant.register_encoding("even", Even, aliases=("rope",))


def test_a_constructor_that_requires_more_needs_for_model() -> None:
    with refuses(LocantError, "Wide", "num_widgets", "for_model"):
        Wide.for_model(SHAPE)
    assert type(Wide.for_model(SHAPE, num_widgets=2)) is Wide
    assert type(WideForAModel.for_model(SHAPE)) is WideForAModel


@pytest.mark.usefixtures("_fresh")
def test_a_broken_plug_in_is_reported_by_name_and_the_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [
        EntryPoint("even", f"{__name__}:Even", "locant.encodings"),
        EntryPoint("lost", "no_such_package:Lost", "locant.encodings"),
        EntryPoint("number", f"{__name__}:LISTING_ORDER", "locant.encodings"),
    ]
    monkeypatch.setattr("locant.registry.entry_points", lambda group: offers if group == "locant.encodings" else [])
    before = [*encodings()][:-1]
    assert find("even") is find("every_other") is Even
    assert [*encodings()] == [*before, "even"]
    assert set(broken_encodings()) == {"lost", "number"}
    with refuses(InputError, "'lost'", "no_such_package"):
        encoding("lost")
    with refuses(InputError, "'number'", "PositionEncoding"):
        encoding("number")


def test_a_size_without_its_name_is_answered_with_the_name() -> None:
    with refuses(RangeError, "got 64 without a name for 'RoPE'", "locant.encoding('rotary', head_dim=...)"):
        encoding("RoPE", 64)


@pytest.mark.parametrize("letters", ["x", "position", "(", "llama"])
def test_a_long_text_is_not_read_as_a_title(letters: str) -> None:
    with pytest.raises(RangeError) as caught:
        encoding(letters * 20_000)
    assert len(str(caught.value)) < 1000
