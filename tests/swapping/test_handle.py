"""What `swap` refuses, what it says, and what it writes down."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import locant
from locant.checkpoints import load_swapped
from locant.errors import InputError, LocantError, RangeError
from locant.positions.registry import ENCODINGS
from locant.positions.temperature import Temperature
from tests.refusal import refuses
from tests.registries import restore
from tests.swapping.families import LLAMA, Family, tiny
from tests.swapping.work import ids, padded
from tests.tolerances import LOGITS


class Ours(LlamaForCausalLM):
    """A subclass that is still a model of transformers."""


class Slanted(locant.DistanceBias):
    """An encoding that no configuration can name."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.slope = nn.Parameter(torch.rand(()))

    def of_distance(self, distance: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return -self.slope * distance / (head + 1)


def state(model: Any) -> tuple[Any, ...]:
    """All that a swap could leave behind."""
    hooks = [
        (path, len(each._forward_hooks), len(each._forward_pre_hooks), sorted(vars(each)))
        for path, each in model.named_modules()
    ]
    return hooks, sorted(model.state_dict()), model.config.to_dict(), model.config._attn_implementation


@pytest.mark.parametrize("family", [Family("bloom", "BloomForCausalLM"), Family("mpt", "MptForCausalLM")])
def test_attention_that_calls_no_function_is_refused_for_that_reason(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = tiny(family), []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **options: calls.append(args))
    model.config._attn_implementation = "sdpa"
    tokens, mask, _ = padded()
    model(tokens, attention_mask=mask)
    assert not calls
    with refuses(InputError, family.cls, "ALiBi in its own code", "calls no function by name", "T5's bias"):
        locant.swap(tiny(family), locant.ALiBi(4))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"encoding": locant.ALiBi(8)}, RangeError, ("num_heads=4", "ALiBi")),
        ({"encoding": locant.XPos(32)}, RangeError, ("head_dim=16",)),
        ({"encoding": locant.Rotary(16, layout="interleaved")}, RangeError, ("layout='half'",)),
        ({"encoding": "alibi"}, RangeError, ("'alibi'",)),
        ({"layers": {"every": 5, "encoding": None}}, RangeError, ("every", "4")),
        ({"layers": {"each": 2}}, RangeError, ("each", "every")),
        ({"layers": 3}, RangeError, ("3",)),
        ({"layers": lambda layer, kind: "nope"}, RangeError, ("layer 0", "'nope'")),
        (
            {"encoding": locant.ALiBi(4), "layers": lambda layer, kind: None},
            InputError,
            ("both encoding and a function",),
        ),
        ({"angles": "float64"}, RangeError, ("angles",)),
        ({"layers": {"every": 2, "encoding": locant.Sinusoidal(64)}}, InputError, ("embeddings",)),
        ({"encoding": locant.Sinusoidal(32)}, RangeError, ("d_model=64",)),
        ({"encoding": locant.Learned(100, 32)}, RangeError, ("d_model=64",)),
        ({"encoding": locant.ALiBi(4), "angles": "float32"}, InputError, ("angles='float32'",)),
        ({"encoding": locant.encoding("fox", d_model=64, num_heads=4)}, InputError, ("Fox", "hidden states")),
        ({"layers": {}}, RangeError, ("{}", "every")),
        ({"layers": lambda layer, kind: None}, RangeError, ("none of the 4 layers", "every")),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(
    options: dict[str, Any], error: type[locant.LocantError], words: tuple[str, ...]
) -> None:
    model = tiny(LLAMA)
    before = state(model)
    with refuses(error, *words):
        locant.swap(model, **options)
    assert state(model) == before


def test_models_without_a_point_are_refused_by_name() -> None:
    with refuses(InputError, "Linear"):
        locant.swap(nn.Linear(2, 2))
    with refuses(InputError, "no rotary", "one table of learned positions"):  # what else is suggested is refused, too
        locant.swap(tiny(Family("bloom", "BloomForCausalLM")))
    with refuses(InputError, "no rotary", "swap(model, encoding)"):
        locant.swap(tiny(Family("opt", "OPTForCausalLM")))
    with refuses(InputError, "BloomForCausalLM", "ALiBi in its own code"):
        locant.swap(tiny(Family("bloom", "BloomForCausalLM")), locant.PositionEncoding())
    model = tiny(LLAMA)
    model.config._attn_implementation = "flash_attention_2"
    with refuses(InputError, "flash_attention_2", "fused"):
        locant.swap(model, locant.ALiBi(4))
    remote = type("Remote", (nn.Module,), {"__module__": "transformers_modules.remote"})
    with refuses(InputError, "Remote"):
        locant.swap(remote())


def test_positions_on_several_axes_are_not_added_to_embeddings() -> None:
    """Qwen2-VL gives its tokens a time, a row and a column."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 99,
             "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=sizes, vision_config=vision))
    before = state(model)
    with refuses(InputError, "Qwen2VL", "3 axes", "ALiBi"):
        locant.swap(model, locant.Learned(64, 64))
    assert state(model) == before


def test_a_module_that_computes_something_else_is_refused() -> None:
    model = tiny(LLAMA)
    model.model.rotary_emb.inv_freq *= 2
    with refuses(InputError, "model.rotary_emb", "LlamaRotaryEmbedding", "does not compute"):
        locant.swap(model)
    with refuses(InputError, "does not compute"):
        locant.swap(model, layers={"every": 2, "encoding": locant.ALiBi(4)})


@pytest.mark.parametrize("spoil", ["rounded", "doubled"])
@pytest.mark.parametrize("encoding", [locant.ALiBi(4), locant.Rotary(16, base=500.0), locant.PositionEncoding()])
@torch.no_grad()
def test_another_encoding_needs_nothing_of_the_frequencies_of_the_model(spoil: str, encoding: Any) -> None:
    """As the remedy says, which was refused itself."""
    model = tiny(LLAMA).double()
    with locant.swap(model, encoding):
        expected = model(ids()).logits
    if spoil == "rounded":
        model.model.rotary_emb.bfloat16().float()
    else:
        model.model.rotary_emb.inv_freq *= 2
    with locant.swap(model, encoding):
        assert (model(ids()).logits - expected).abs().max() <= LOGITS


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_its_own_encoding_repairs_frequencies_that_were_rounded(narrow: torch.dtype) -> None:
    model = tiny(LLAMA)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(narrow))
    expected, kept = model(ids()).logits, model.model.rotary_emb.inv_freq.clone()
    with locant.swap(model) as swapped:
        assert "rounded" not in repr(swapped)
    model = tiny(LLAMA).to(narrow).float()
    assert not torch.equal(model.model.rotary_emb.inv_freq, kept)
    assert not torch.equal(model(ids()).logits, expected)
    with locant.swap(model, angles="float32") as swapped:
        assert torch.equal(model(ids()).logits, expected)
        assert "were rounded to 16 bits, and its angles are off by up to 0.0" in swapped.sentences[0]
        assert "in the first 11 tokens" in swapped.sentences[0]


@pytest.mark.parametrize("encoding", [None, locant.ALiBi(4), locant.Kerple(4), locant.Sinusoidal(64)])
def test_undo_leaves_nothing_and_a_model_is_swapped_once(encoding: Any) -> None:
    model = tiny(LLAMA)
    before = state(model)
    swapped = locant.swap(model, encoding)
    with refuses(InputError, "already swapped", "undo"):
        locant.swap(model)
    assert len(swapped.sentences) == 4
    swapped.undo()
    swapped.undo()
    assert state(model) == before


def test_a_swap_that_fails_on_its_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(LLAMA)
    before = state(model)

    def fail(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(model.model, "set_attn_implementation", fail)
    with pytest.raises(RuntimeError, match="locant"):
        locant.swap(model, locant.Kerple(4))
    monkeypatch.undo()
    assert state(model) == before
    assert len(locant.swap(model).sentences) == 4


class Unnamed(locant.ALiBi):
    def extra_repr(self) -> str:
        raise RuntimeError("no name")


def test_a_swap_that_cannot_be_described_leaves_nothing() -> None:
    model = tiny(LLAMA)
    before = state(model)
    with pytest.raises(RuntimeError, match="no name"):
        locant.swap(model, Unnamed(4))
    assert state(model) == before


def test_undo_works_if_a_user_removed_the_entry() -> None:
    model = tiny(LLAMA)
    before = model(ids()).logits
    swapped = locant.swap(model, locant.ALiBi(4))
    del model.config.locant
    swapped.undo()
    assert torch.equal(model(ids()).logits, before)


@pytest.mark.parametrize("named", ["eager", "sdpa"])
def test_another_attention_does_not_lose_the_encoding_in_silence(named: str) -> None:
    model = tiny(LLAMA)
    swapped = locant.swap(model, locant.ALiBi(4))
    model.set_attn_implementation(named)
    with refuses(LocantError, f"{named} attention", "handle.undo()"):
        model(ids())
    swapped.undo()
    assert model.config._attn_implementation == named


def test_models_of_one_configuration_are_swapped_apart() -> None:
    first = tiny(LLAMA)
    second = LlamaForCausalLM(first.config).eval()
    before, unswapped = second(ids()).logits, state(second)
    with locant.swap(first, locant.Kerple(4)) as one, torch.no_grad():
        logits = first(ids()).logits
        assert torch.equal(second(ids()).logits, before)
        assert state(second) == unswapped
        with locant.swap(second, locant.ALiBi(4)) as other:
            assert one.sentences != other.sentences
            assert torch.equal(first(ids()).logits, logits)
        with refuses(LocantError, "configuration of a swapped"):
            LlamaForCausalLM(first.config)(ids())
    assert torch.equal(second(ids()).logits, before)


@pytest.mark.parametrize("encoding", [locant.Kerple(4), locant.Learned(32, 64)], ids=lambda each: each.info.name)
def test_a_copy_of_a_swapped_model_is_apart_and_stays_swapped(encoding: Any) -> None:
    model = tiny(LLAMA)
    before = model(ids()).logits
    handle = locant.swap(model, encoding)
    during, copied = model(ids()).logits, copy.deepcopy(model)
    assert torch.equal(copied(ids()).logits, during)
    with torch.no_grad():
        for parameter in copied.model.locant.parameters():
            parameter.mul_(2).add_(0.5)
    of_copy = copied(ids()).logits
    assert not torch.equal(of_copy, during)
    assert torch.equal(model(ids()).logits, during)
    handle.undo()
    assert torch.equal(model(ids()).logits, before)
    assert torch.equal(copied(ids()).logits, of_copy)
    with refuses(InputError, "a copy of a swapped model", "before you swap it"):
        locant.swap(copied)


def test_a_temperature_of_queries_is_not_lost() -> None:
    """It cannot be told by angles, which are all that the model's own code is given."""
    model, temperature = tiny(LLAMA), Temperature(step=4, weight=0.5)
    with locant.swap(model, locant.Rotary(16)):
        plain = model(ids()).logits
    with locant.swap(model, locant.Rotary(16, temperature=temperature)) as swapped:
        warm = model(ids()).logits
    assert "in its attention scores" in swapped.sentences[0]
    assert (warm - plain)[:, :4].abs().max() <= LOGITS, "before the trained length there is none"
    assert (warm - plain)[:, 4:].abs().max() > 10 * LOGITS


def trained(model: Any) -> Any:
    """Its encoding has learned something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "locant" in name:
                parameter.mul_(1.5)
    return model


@pytest.mark.parametrize(
    "plan",
    [
        {"encoding": locant.Kerple(4)},
        {"encoding": locant.Rotary(16, scaling=locant.scaling.YaRN(factor=4.0, original_max_seq_len=64))},
        {"layers": {"every": 2, "encoding": locant.T5Bias(4)}, "angles": "float32"},
    ],
    ids=["learned", "scaled", "some layers"],
)
def test_it_is_saved_with_the_model_and_loaded(tmp_path: Path, plan: dict[str, Any]) -> None:
    model = tiny(LLAMA)
    locant.swap(model, **plan)
    trained(model).save_pretrained(tmp_path)
    again = load_swapped(tmp_path)
    assert again.config.locant == model.config.locant
    assert torch.equal(again(ids()).logits, model(ids()).logits)


EAGER = {"attn_implementation": "eager"}


@pytest.mark.parametrize("options", [{}, EAGER, {**EAGER, "experts_implementation": "eager"}])
@pytest.mark.parametrize("cls", [AutoModel, AutoModelForCausalLM, LlamaForCausalLM])
def test_transformers_alone_does_not_load_it_without_its_encoding(
    saved: Path, tmp_path: Path, cls: Any, options: dict[str, str]
) -> None:
    if importlib.util.find_spec("transformers.fusion_mapping"):  # this release knows fusions
        with pytest.raises(ValueError, match=r"encodings of locant, load it with locant\.checkpoints\.load_swapped"):
            cls.from_pretrained(saved, **options)
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    del config["fusion_config"]  # older releases do not read it
    folder = Path(shutil.copytree(saved, tmp_path / "older"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if len(options) < 2:
        with pytest.raises(ValueError, match=r'implementation="locant\.checkpoints\.load_swapped"'):
            cls.from_pretrained(folder, **options)


def test_fusions_of_the_model_are_kept(tmp_path: Path) -> None:
    model = tiny(LLAMA)
    model.config.fusion_config = fusions = {"patch_embeddings": False}
    with locant.swap(model, locant.ALiBi(4)):
        model.save_pretrained(tmp_path)
    assert model.config.fusion_config == fusions
    again = load_swapped(tmp_path)
    assert again.config.fusion_config.items() > fusions.items()
    assert torch.equal(again(ids()).logits, load_swapped(tmp_path)(ids()).logits)


LOAD = """
import sys
from transformers import {cls}
try:
    {cls}.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
assert "locant" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_transformers_alone_refuses_it_by_the_name_of_what_loads_it(saved: Path, cls: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOAD.format(cls=cls), saved], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "locant.checkpoints.load_swapped" in done.stdout


OLD_SENTENCE = "the positions of this model are locant's: load it with locant.checkpoints.load_swapped(folder)"


ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
OLD_NAMES = ("locant.checkpoints.load_swapped", OLD_SENTENCE)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_a_folder_of_an_earlier_version_is_loaded(saved: Path, tmp_path: Path, name: str) -> None:
    """It named a sentence, or what loads it, as its attention function, and nothing else."""
    folder = Path(shutil.copytree(saved, tmp_path / "old"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["fusion_config"], config["experts_implementation"]
    (folder / "config.json").write_text(json.dumps({**config, **dict.fromkeys(ATTENTION_KEYS, name)}))
    assert torch.equal(load_swapped(folder)(ids()).logits, load_swapped(saved)(ids()).logits)
    with pytest.raises(ValueError, match=r"locant\.checkpoints\.load_swapped"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_a_folder_without_its_entry_is_not_sent_back_to_transformers(saved: Path, tmp_path: Path, name: str) -> None:
    """Which would send the caller to `load_swapped` again."""
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    del config["locant"]
    config = config | {"attn_implementation": name}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with refuses(InputError, "config.json", "'locant'", "it is missing", "as it was saved"):
        load_swapped(tmp_path)


def test_an_encoding_of_ones_own_is_given_again(tmp_path: Path) -> None:
    model = tiny(LLAMA)
    assert "load_swapped(folder, encoding=...)" in locant.swap(model, Slanted(4)).sentences[0]
    trained(model).save_pretrained(tmp_path)
    with refuses(InputError, "does not describe", "encoding="):
        load_swapped(tmp_path)
    assert torch.equal(load_swapped(tmp_path, encoding=Slanted(4))(ids()).logits, model(ids()).logits)


class Kept(Slanted):
    """What it is registered as tells all."""


class Forgetful(locant.Rotary):
    """Nothing that it keeps tells at what speed it was built to turn."""

    def __init__(self, head_dim: int, *, speed: float = 1.0) -> None:
        super().__init__(head_dim, scaling=locant.scaling.Linear(factor=speed))

    def extra_repr(self) -> str:
        return ""


def test_one_that_is_registered_is_built_again_where_all_of_its_options_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore(ENCODINGS, monkeypatch)
    locant.register_encoding("test_of_kept", Kept)
    locant.register_encoding("test_of_forgetful", Forgetful)
    model = tiny(LLAMA)
    with locant.swap(model, Forgetful(16, speed=4.0)) as swapped:
        assert "load_swapped(folder, encoding=...)" in swapped.sentences[0]
    assert "load_swapped" not in locant.swap(model, Kept(4)).sentences[0]
    trained(model).save_pretrained(tmp_path)
    assert torch.equal(load_swapped(tmp_path)(ids()).logits, model(ids()).logits)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(text.replace("test_of_kept", "of_a_package_that_is_not_here"))
    assert torch.equal(load_swapped(tmp_path, encoding=Kept(4))(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    "entry",
    [
        None, "alibi", [], {}, {"encodings": [None]}, {"encodings": 3, "layers": []},
        {"encodings": [{"name": "alibi"}], "layers": [0] * 4},
        {"encodings": [{"name": "alibi", "options": {"heads": 4}}], "layers": [0] * 4},
        {"encodings": [{"name": "alibii", "options": {}}], "layers": [0] * 4},
        {"encodings": [{"name": "rotary", "options": {"head_dim": 16, "scaling": {"kind": "Yarn"}}}], "layers": [0]},
        {"encodings": [{"name": "alibi", "options": {"num_heads": 4}}], "layers": [0, 0, 0, 1]},
        {"encodings": [{"name": "alibi", "options": {"num_heads": 4}}], "layers": [0, 0, 0, -1]},
        {"encodings": [{"name": "alibi", "options": {"num_heads": 4}}], "layers": [0] * 3},
        {"encodings": [{"name": "alibi", "options": {"num_heads": 4}}], "layers": [0] * 5},
        {"encodings": [{"name": "alibi", "options": {"num_heads": 4}}], "layers": [None, 0, 0, 0], "angles": 32},
    ],
)  # fmt: skip
def test_a_damaged_entry_is_refused(saved: Path, entry: Any) -> None:
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (saved / "config.json").write_text(json.dumps(config | {"locant": entry}), encoding="utf-8")
    with refuses(InputError, "config.json", "'locant'", "as it was saved"):
        load_swapped(saved)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with ALiBi."""
    folder, model = tmp_path_factory.mktemp("saved"), tiny(LLAMA)
    locant.swap(model, locant.ALiBi(4))
    model.save_pretrained(folder)
    return folder


def test_what_lacks_something_is_not_loaded(tmp_path: Path) -> None:
    model = tiny(LLAMA)
    model.save_pretrained(tmp_path)
    with refuses(InputError, "not swapped"):
        load_swapped(tmp_path)
    locant.swap(model, locant.Kerple(4))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: each for name, each in weights.items() if "locant" not in name}, tmp_path / "model.safetensors")
    with refuses(InputError, "model.locant.0.r1"):
        load_swapped(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["locant"]["layers"] == [0, 0, 0, 0]
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with refuses(InputError, "a pickle"):
        load_swapped(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "theirs.Model"}}))
    with refuses(InputError, "code of its own"):
        load_swapped(tmp_path)
