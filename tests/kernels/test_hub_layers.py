"""The layers that `kernels.kernelize` puts into models of `transformers`.

Versions of `transformers` that refuse the installed `kernels` have no hooks for it: they are put in as theirs are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import locant
from hub.build import build
from tests.engines.record import record
from tests.tolerances import LOGITS, assert_close

kernels = pytest.importorskip("kernels", reason="the Hub's library is not installed: pip install kernels")
transformers = pytest.importorskip("transformers")

from transformers.utils.import_utils import is_kernels_available  # noqa: E402 -- of versions before 5 there is none

pytestmark = pytest.mark.slow

IDS = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1 + i / 16 for i in range(8)], "long_factor": [1 + i * 1.5 for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    with mock.patch.dict("os.environ", {"CC": "false"}):
        build(folder)
    return folder


def _model(kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if not is_kernels_available():
        module = sys.modules[type(model).__module__]
        if not isinstance(module.apply_rotary_pos_emb, torch.nn.Module):
            hook = kernels.use_kernel_forward_from_hub("rotary_pos_emb")
            module.apply_rotary_pos_emb = hook(module.apply_rotary_pos_emb)
        for layer in model.model.layers:
            layer.self_attn._kernel_funcs = {"rotary": module.apply_rotary_pos_emb}
    return model


def _scaled(name: str) -> Any:
    return _model(rope_parameters={"rope_type": name, "rope_theta": 10_000.0, **ROPES[name]})


@contextmanager
def _kernelized(model: Any, folder: Path, mode: Any, **layers: str) -> Iterator[None]:
    """Layers of the kernel have the place of those of these names: of functions in all models of a kind, not in one."""
    mapping = {
        name: {"cpu": {mode: kernels.LocalLayerRepository(folder, layer_name=layer)}} for name, layer in layers.items()
    }
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device="cpu")
    yield
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device="cpu")


@contextmanager
def _counted() -> Iterator[list[str]]:
    """Calls of the layers, which have no other mark in a model."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patches:
        for name, module in [*sys.modules.items()]:
            if name.startswith("_locant_rotary") and name.endswith(".layers"):
                rotated = module._rotated
                patches.setattr(
                    module, "_rotated", lambda *x, rotated=rotated: (calls.append("_rotated"), rotated(*x))[1]
                )
        yield calls


def _gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype)
    model.zero_grad()
    (logits * cotangent).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2", "nanochat"])
def test_a_model_with_our_rotation_has_the_same_logits_and_gradients(
    kind: str, dtype: torch.dtype, compiled: bool, folder: Path
) -> None:
    model = _model(kind).to(dtype)
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if compiled else kernels.Mode.TRAINING
    expected = model(IDS).logits
    of_theirs = _gradients(model, expected)
    with _kernelized(model, folder, mode, rotary_pos_emb="apply_rotary_transformers"), _counted() as calls:
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        found = run(IDS).logits
        assert compiled or len(calls) == 4, "two layers, q and k"
        of_ours = _gradients(model, found)
    off = max(float((of_ours[name] - grad).abs().max()) for name, grad in of_theirs.items())
    off = max(off, float((found - expected).detach().abs().max()))
    record("kernels", "logits and gradients of kernelized models", off, package="kernels", unit="absolute")
    assert torch.equal(found, expected)
    assert all(torch.equal(of_ours[name], grad) for name, grad in of_theirs.items())


@pytest.mark.skipif(is_kernels_available(), reason="these versions fit each other")
def test_versions_that_do_not_fit_say_nothing_and_leave_a_model_as_it_is(folder: Path) -> None:
    config = transformers.AutoConfig.for_model("mistral", **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layers = {"rotary_pos_emb": "apply_rotary_transformers"}
    with _kernelized(model, folder, kernels.Mode.INFERENCE, **layers), _counted() as calls:
        model(IDS)
    assert not calls


@pytest.mark.parametrize("start", [0, 1_000_000])
@pytest.mark.parametrize("name", ROPES)
def test_exact_angles_have_the_bits_of_a_swapped_model(name: str, start: int, folder: Path) -> None:
    model = _scaled(name)
    kernels.replace_kernel_forward_from_hub(type(model.model.rotary_emb), "locant_angles")
    layers = {"rotary_pos_emb": "apply_rotary_transformers", "locant_angles": "exact_angles"}
    places = torch.arange(start, start + IDS.shape[1])[None]
    with torch.no_grad():
        with _kernelized(model, folder, kernels.Mode.INFERENCE, **layers):
            found = model(IDS, position_ids=places).logits
        encoding = locant.Rotary.from_config(model.config).for_length(start + IDS.shape[1])
        with locant.swap(model, encoding):
            expected = model(IDS, position_ids=places).logits
    off = float((found - expected).abs().max())
    record("kernels", "exact angles in every scaling, against `locant.swap`", off, package="kernels")
    assert torch.equal(found, expected)
    if start:
        assert (found - model(IDS, position_ids=places).logits).abs().max() > 0.01, "its angles are those of float32"


LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {}, "olmo2": {}, "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # the name that all versions take
def test_attention_with_the_norm_in_the_same_pass_is_the_models_attention(kind: str, folder: Path) -> None:
    """With exact angles the logits have the same bits. Gemma 3 has two kinds of them, and float32 is exact near 0."""
    model = _model(kind, **LAYERS[kind])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_norm" in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) / 4)
    angles = {} if kind == "gemma3_text" else {f"angles_{kind}": "exact_angles"}
    kernels.replace_kernel_forward_from_hub(type(model.model.rotary_emb), f"angles_{kind}")
    kernels.replace_kernel_forward_from_hub(type(model.model.layers[0].self_attn), f"attention_{kind}")
    with _kernelized(model, folder, kernels.Mode.TRAINING, **angles):
        expected = model(IDS, use_cache=False).logits
        of_theirs = _gradients(model, expected)
    with _kernelized(model, folder, kernels.Mode.TRAINING, **{f"attention_{kind}": "qk_norm_attention"}):
        with _passes() as passes:
            found = model(IDS, use_cache=False).logits
        of_ours = _gradients(model, found)
        with torch.no_grad():
            first = model(IDS[:, :-1], use_cache=True)
            step = model(IDS[:, -1:], past_key_values=first.past_key_values).logits
    assert len(passes) == SIZES["num_hidden_layers"]
    assert_close(found, expected)
    assert torch.equal(found, expected) or not angles
    assert float((step - found[:, -1:]).detach().abs().max()) <= LOGITS * float(found.detach().abs().max())
    for name, gradient in of_theirs.items():
        assert_close(of_ours[name] / gradient.abs().max(), gradient / gradient.abs().max())


@contextmanager
def _passes() -> Iterator[list[Any]]:
    """The calls of norm and rotation by the layers of the kernel."""
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patches:
        for name, module in [*sys.modules.items()]:
            if name.startswith("_locant_rotary") and name.endswith(".layers"):
                run = module.norm_and_rotate
                patches.setattr(module, "norm_and_rotate", lambda *x, run=run: (calls.append(x), run(*x))[1])
        yield calls


def test_norms_of_other_kinds_are_refused(folder: Path) -> None:
    layers = kernels.get_local_kernel(folder, backend="cpu").layers

    class Centred(torch.nn.LayerNorm):
        def __init__(self, width: int, eps: float) -> None:
            super().__init__(width, eps, bias=False)

    with pytest.raises(ValueError, match="RMSNorm of Qwen3"):
        layers._norm_settings(Centred, 1e-6)


def test_functions_that_turn_otherwise_are_refused(folder: Path) -> None:
    layers = kernels.get_local_kernel(folder, backend="cpu").layers

    def interleaved(_: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = (torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2) for x in (q, k))
        return tuple(x * cos + y * sin for x, y in zip((q, k), rotated, strict=True))  # type: ignore[return-value]

    with pytest.raises(ValueError, match="pairs of i"):
        layers._convention(interleaved)


def test_cosines_that_learn_have_their_gradients(folder: Path) -> None:
    layer = kernels.get_local_kernel(folder, backend="cpu").layers.apply_rotary_transformers()
    q, k = (torch.randn(2, heads, 5, 6, dtype=torch.float64, requires_grad=True) for heads in (3, 1))
    cos, sin = (torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    halves = [torch.cat([each[..., :3]] * 2, dim=-1) for each in (cos, sin)]
    assert torch.autograd.gradcheck(lambda *x: layer(*x), (q, k, *halves))
    assert torch.autograd.gradcheck(lambda *x: layer(*x, cos.detach(), sin.detach()), (q, k))
