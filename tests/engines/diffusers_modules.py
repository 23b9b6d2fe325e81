"""The rotary modules of `diffusers`: found in its sources, built as its transformers build them, and run."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from locant import Positions, Rotary
from locant.engines.diffusers import encoding_from_diffusers, positions_from_diffusers
from locant.engines.diffusers_rows import TRANSFORMERS
from locant.positions.angles import AngleMode
from tests.tolerances import ROTATED_TOKEN, SMALL_ROUNDING

__all__ = [
    "CASES", "DIFFERS", "GRID", "OPTIONS", "TEXT", "Outcome", "built", "class_of", "defaults", "files", "found",
    "module_of", "nested", "outcome", "root", "table",
]  # fmt: skip

GRID = (3, 4, 6)
"""Frames, rows and columns, apart from each other."""

TEXT = 5
LATENT = torch.zeros(1, 1, 3, 8, 12)
"""What has `GRID` patches of 1 x 2 x 2."""

Turn = Callable[[Tensor], Tensor]
"""From queries ``[1, heads, tokens, width]`` to rotated ones."""

# ---------------------------------------------------------------------- finding them

MAKES = re.compile(r"get_1d_rotary_pos_embed\w*\(|torch\.polar\(")
ANGLES = re.compile(r"theta|inv_freq|outer|freqs")
CALLED_SO = re.compile(r"Rotary|Rope|R[oO]PE|EmbedND|PosEmbed|^_?rope\b|rope_params")
USES = re.compile(r"^_?apply|Processor|Pipeline|Step$|Output$|Test|Text\w*Pooler")


def root() -> Path:
    package = importlib.util.find_spec("diffusers")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent


@functools.cache
def found() -> set[str]:
    """``file:name`` of every class and function that makes cosines and sines, or is called as if it did."""
    names = set()
    for folder in ("models", "pipelines"):
        for path in (root() / folder).rglob("*.py"):
            text = path.read_text()
            if "cos" in text or "otary" in text or "RoPE" in text:
                names |= {f"{path.stem}:{name}" for name in _made_in(text, ast.parse(text))}
    return names


def _made_in(text: str, tree: Any, prefix: str = "") -> set[str]:
    names, lines = set(), text.splitlines()
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or USES.search(node.name):
            continue
        if isinstance(node, ast.ClassDef) and any("Mixin" in ast.unparse(base) for base in node.bases):
            names |= _made_in(text, node, f"{node.name}.")
            continue
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        both = re.search(r"\bcos\b", source) and re.search(r"\bsin\b", source) and ANGLES.search(source)
        if MAKES.search(source) or both or CALLED_SO.search(node.name):
            names.add(prefix + node.name)
    return names


# ---------------------------------------------------------------------- building them


@functools.cache
def files() -> dict[str, str]:
    """The module of every class of a transformer."""
    return {
        name: f"diffusers.models.transformers.{path.stem}"
        for path in (root() / "models" / "transformers").glob("*.py")
        for name in re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE)
    }


def module_of(name: str) -> Any:
    return importlib.import_module(files()[name])


def class_of(name: str) -> Any:
    return getattr(module_of(name), name)


def defaults(name: str) -> dict[str, Any]:
    """The configuration that a transformer saves when it is built from its defaults."""
    signature = inspect.signature(class_of(name).__init__).parameters
    values = {key: one.default for key, one in signature.items() if one.default is not inspect.Parameter.empty}
    return {"_class_name": name, **{key: value for key, value in values.items() if key != "kwargs"}}


class Recorded(Exception):  # noqa: N818  # it ends a constructor, and is no error
    pass


def arguments_of(transformer: str, rotary: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """What a transformer calls the constructor of its rotary module with; nothing after that is built."""
    module = _home(transformer, rotary)
    cls, own = getattr(module, rotary), getattr(module, rotary).__init__

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Recorded(args, kwargs)

    cls.__init__ = record
    try:
        with torch.device("meta"):
            class_of(transformer)(**{key: value for key, value in config.items() if key != "_class_name"})
    except Recorded as recorded:
        return recorded.args
    finally:
        cls.__init__ = own
    raise AssertionError(f"{transformer} builds no {rotary}")


def built(transformer: str, rotary: str, config: dict[str, Any]) -> Any:
    args, kwargs = arguments_of(transformer, rotary, config)
    return getattr(_home(transformer, rotary), rotary)(*args, **kwargs)


def _home(transformer: str, rotary: str) -> Any:
    """Chroma imports it from a place where it is no class any more."""
    return module_of("FluxTransformer2DModel" if rotary == "FluxPosEmbed" else transformer)


def nested(path: Path | str, name: str, inside: str = "", **scope: Any) -> Any:
    """A function out of a file, of a class in it or inside a method, in a scope of its own."""
    tree: Any = ast.parse(Path(path).read_text())
    if inside:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == inside)
    one = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(body=[*future, one], type_ignores=[]), str(path), "exec"), scope)  # noqa: S102
    return scope[name]


# ---------------------------------------------------------------------- running them


def _real(cos: Tensor, sin: Tensor, unbind: int = -1) -> Turn:
    from diffusers.models.embeddings import apply_rotary_emb

    return lambda q: apply_rotary_emb(q, (cos, sin), use_real_unbind_dim=unbind)


def _by_ids(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    return _real(*built(name, rotary, config)(ids.float()))


def _by_latent(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    patches = config.get("patch_size")
    latent = LATENT if patches in (2, (1, 2, 2), [1, 2, 2]) else torch.zeros(1, 1, *GRID)
    return _real(*built(name, rotary, config)(latent))


def _wan(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    cos, sin = built(name, rotary, config)(LATENT)
    code = module_of("WanTransformer3DModel" if "VACE" in name else name)
    turn = nested(code.__file__, "apply_rotary_emb", torch=torch)
    return lambda q: turn(q.transpose(1, 2), cos, sin).transpose(1, 2)


def _half(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    two = "CogView" in name or "Glm" in name
    return _real(*built(name, rotary, config)(LATENT[:, :, 0] if two else LATENT), unbind=-2)


def _of_matrices(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    module, code = built(name, rotary, config), module_of(name)
    matrices = module(ids[None].float())
    if name.startswith("PRX"):
        return lambda q: code.apply_rope(q, matrices)
    return lambda q: code.apply_rope(q.transpose(1, 2), q.transpose(1, 2), matrices)[0].transpose(1, 2)


def _kandinsky(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    module, code, axes = built(name, rotary, config), module_of(name), [*map(torch.arange, GRID)]
    if name.startswith("Kandinsky5"):
        rope, turn = module((1, *GRID), axes), nested(code.__file__, "apply_rotary", torch=torch)
    else:
        rope, turn = module(tuple(axes), config["scale_factor"]), code.apply_rotary
    rope = rope.reshape(-1, 1, *rope.shape[-3:])
    return lambda q: turn(q.transpose(1, 2), rope).type_as(q).transpose(1, 2)


def _z_image(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    cls = getattr(module_of(name), rotary)
    args, kwargs = arguments_of(name, rotary, config)
    angles, turn = cls(*args, **kwargs)(ids), nested(module_of(name).__file__, "apply_rotary_emb", torch=torch)
    return lambda q: turn(q.transpose(1, 2), angles[None]).transpose(1, 2)


def _lumina_2(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    frames, rows, columns = GRID
    latent = torch.zeros(1, 1, 2 * frames * rows, 2 * columns)
    angles = built(name, rotary, config)(latent, torch.ones(1, TEXT, dtype=torch.int64))[3]
    return _embeddings("apply_rotary_emb", angles)


def _embeddings(function: str, angles: Tensor) -> Turn:
    turn = getattr(importlib.import_module("diffusers.models.embeddings"), function)
    return lambda q: turn(q.transpose(1, 2), angles, use_real=False).transpose(1, 2)


def _qwen(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    picture, text = built(name, rotary, config)(
        [GRID], max_txt_seq_len=TEXT, **({} if name.startswith("Nucleus") else {"device": torch.device("cpu")})
    )
    code, first = module_of(name), name.startswith("Qwen")
    turn = code.apply_rotary_emb_qwen if first else code._apply_rotary_emb_nucleus
    angles = torch.cat([text, picture] if first else [picture, text])
    return lambda q: turn(q.transpose(1, 2), angles, use_real=False).transpose(1, 2)


def _qwen_21(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    _, rows, columns = GRID
    is_picture = torch.arange(TEXT + rows * columns) >= TEXT
    angles = built(name, rotary, config)([(1, rows, columns)], is_picture, torch.device("cpu"))
    return lambda q: module_of(name).apply_rotary_emb_qwen(q.transpose(1, 2), angles, use_real=False).transpose(1, 2)


def _any_flow(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    angles = built(name, rotary, config)._forward_full_frame(*GRID, torch.device("cpu"))
    angles, turn = angles.reshape(1, 1, -1, angles.shape[-1]), module_of(name).apply_rotary_emb
    return lambda q: turn(q, angles)


def _sana_wm(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    angles, turn = built(name, rotary, config)(GRID), module_of(name)._apply_rotary_emb
    return lambda q: turn(q.transpose(2, 3), angles).transpose(2, 3)


def _helios(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    module, (frames, rows, columns) = built(name, rotary, config), GRID
    angles = module(torch.arange(frames)[None], rows, columns, torch.device("cpu")).flatten(2).transpose(1, 2)
    turn = module_of(name).apply_rotary_emb_transposed
    return lambda q: turn(q.transpose(1, 2), angles).transpose(1, 2)


def _framepack(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    return _real(*built(name, rotary, config)(torch.arange(GRID[0]), 8, 12, torch.device("cpu")))


def _hunyuan_image(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    return _real(*built(name, rotary, config)(torch.zeros(1, 1, *GRID[1:])))


def _joy(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    sizes = {key: config[key] for key in ("hidden_size", "num_attention_heads", "rope_dim_list", "theta")}
    itself, method = SimpleNamespace(**sizes, config=SimpleNamespace(**sizes)), getattr(class_of(name), rotary)
    if name == "JoyImageEditTransformer3DModel":
        angles, turn = method(itself, list(GRID))[0], module_of(name)._apply_rotary_emb
    else:
        angles = tuple(each[None] for each in method(itself, (0, 0, 0), GRID))
        turn = module_of(name)._apply_rotary_emb_batched
    return lambda q: turn(q.transpose(1, 2), q.transpose(1, 2), angles)[0].transpose(1, 2)


def _wan_animate_2(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    sizes = SimpleNamespace(dim=config["dim"], num_heads=config["num_heads"])
    itself = SimpleNamespace(config=sizes, rope_freqs_cache={})
    angles = class_of(name)._rope_freqs(itself, (0, 0, 0), torch.device("cpu"))
    return lambda q: module_of(name).rope_apply(q.transpose(1, 2), torch.tensor([GRID]), angles).transpose(1, 2)


def _mrope(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    module, code = built(name, rotary, config), module_of(name)
    if name.startswith("Ideogram"):
        cos, sin = module(ids[None])
    else:
        cos, sin = module(ids.T[:, None], ids.device, torch.float32)
    return lambda q: q * cos[:, None] + code._rotate_half(q) * sin[:, None]


def _mini_max_h3(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    cos, sin = built(name, rotary, config)(ids)
    return lambda q: module_of(name)._apply_rotary_emb(q.transpose(1, 2), cos, sin).transpose(1, 2)


def _cog_video(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    rows, columns = 30, 45
    angles = get_3d_rotary_pos_embed(config["attention_head_dim"], ((0, 0), (rows, columns)), (rows, columns), GRID[0])
    return _real(*angles)


def _easy_animate(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    return _real(*built(name, rotary, config)(torch.zeros(1, 1, GRID[0], 60, 90)))


def _hunyuan_dit(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    return _real(*get_2d_rotary_pos_embed(config["attention_head_dim"], ((0, 0), (32, 32)), (32, 32)))


def _allegro(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    from diffusers.models.embeddings import apply_rotary_emb_allegro, get_3d_rotary_pos_embed_allegro

    frames, rows, columns = GRID
    scales = tuple(config[f"interpolation_scale_{axis}"] for axis in "thw")
    angles = get_3d_rotary_pos_embed_allegro(
        config["attention_head_dim"], ((0, 0), (rows, columns)), (rows, columns), frames, scales
    )[:3]
    return lambda q: apply_rotary_emb_allegro(q, angles, ids.T[:, None])


def _lumina(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    angles = get_2d_rotary_pos_embed_lumina(config["hidden_size"] // config["num_attention_heads"], 384, 384)
    angles = angles[: GRID[1], : GRID[2]].reshape(1, GRID[1] * GRID[2], -1)
    return _embeddings("apply_rotary_emb", angles)


def _sound(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    code, tokens = module_of(name), len(ids)
    if name.startswith("Ace"):
        cpu = torch.device("cpu")
        angles = code._ace_step_rotary_freqs(tokens, config["head_dim"], config["rope_theta"], cpu, torch.float32)
        return _real(*angles, unbind=-2)
    if name.startswith("StableAudioDiT"):
        from diffusers.models.attention_processor import StableAudioAttnProcessor2_0
        from diffusers.models.embeddings import get_1d_rotary_pos_embed

        angles = get_1d_rotary_pos_embed(
            config["attention_head_dim"] // 2, tokens, use_real=True, repeat_interleave_real=False
        )
        return lambda q: StableAudioAttnProcessor2_0().apply_partial_rotary_emb(q, angles)
    module = built(name, rotary, config)
    if name.startswith("StableAudio3"):
        angles = module(tokens, torch.device("cpu"))
        return lambda q: code._apply_rotary_partial(q.transpose(1, 2), angles).transpose(1, 2)
    if name.startswith("LongCat"):
        angles = module(torch.zeros(1, tokens, 1))
        return lambda q: code._apply_rotary_emb(q.transpose(1, 2), angles).transpose(1, 2)
    angles = module(tokens, torch.device("cpu"))
    return lambda q: code._apply_partial_rotary_emb(q.transpose(1, 2), angles).transpose(1, 2)


def _omnigen(name: str, rotary: str, config: dict[str, Any], ids: Tensor) -> Turn:
    angles = built(name, rotary, config)(torch.zeros(1), ids.T)
    return _real(*angles, unbind=-2)


CASES: dict[str, tuple[str, Callable[[str, str, dict[str, Any], Tensor], Turn]]] = {
    "FluxTransformer2DModel": ("FluxPosEmbed", _by_ids),
    "ChromaTransformer2DModel": ("FluxPosEmbed", _by_ids),
    "BriaTransformer2DModel": ("BriaEmbedND", _by_ids),
    "BriaFiboTransformer2DModel": ("BriaFiboEmbedND", _by_ids),
    "OvisImageTransformer2DModel": ("OvisImagePosEmbed", _by_ids),
    "LongCatImageTransformer2DModel": ("LongCatImagePosEmbed", _by_ids),
    "Krea2Transformer2DModel": ("Krea2RotaryPosEmbed", _by_ids),
    "Flux2Transformer2DModel": ("Flux2PosEmbed", _by_ids),
    "Flux3Transformer2DModel": ("Flux3PosEmbed", _by_ids),
    "HiDreamImageTransformer2DModel": ("HiDreamImageEmbedND", _of_matrices),
    "PRXTransformer2DModel": ("PRXEmbedND", _of_matrices),
    "ZImageTransformer2DModel": ("RopeEmbedder", _z_image),
    "BriaFibo2Transformer2DModel": ("RopeEmbedder", _z_image),
    "Lumina2Transformer2DModel": ("Lumina2RotaryPosEmbed", _lumina_2),
    "LuminaNextDiT2DModel": ("get_2d_rotary_pos_embed_lumina", _lumina),
    "QwenImageTransformer2DModel": ("QwenEmbedRope", _qwen),
    "NucleusMoEImageTransformer2DModel": ("NucleusMoEEmbedRope", _qwen),
    "QwenImage21Transformer2DModel": ("QwenImage21Rope", _qwen_21),
    "Ideogram4Transformer2DModel": ("Ideogram4MRoPE", _mrope),
    "Cosmos3OmniTransformer": ("Cosmos3VLTextRotaryEmbedding", _mrope),
    "CosmosTransformer3DModel": ("CosmosRotaryPosEmbed", _half),
    "CogView4Transformer2DModel": ("CogView4RotaryPosEmbed", _half),
    "GlmImageTransformer2DModel": ("GlmImageRotaryPosEmbed", _half),
    "MiniMaxH3Transformer3DModel": ("MiniMaxH3RotaryPosEmbed", _mini_max_h3),
    "WanTransformer3DModel": ("WanRotaryPosEmbed", _wan),
    "WanVACETransformer3DModel": ("WanRotaryPosEmbed", _wan),
    "WanAnimateTransformer3DModel": ("WanRotaryPosEmbed", _wan),
    "SanaVideoTransformer3DModel": ("WanRotaryPosEmbed", _wan),
    "SkyReelsV2Transformer3DModel": ("SkyReelsV2RotaryPosEmbed", _wan),
    "ChronoEditTransformer3DModel": ("ChronoEditRotaryPosEmbed", _wan),
    "WanAnimate2Transformer3DModel": ("rope_params", _wan_animate_2),
    "AnyFlowTransformer3DModel": ("AnyFlowRotaryPosEmbed", _any_flow),
    "AnyFlowFARTransformer3DModel": ("AnyFlowCausalRotaryPosEmbed", _any_flow),
    "SanaWMTransformer3DModel": ("SanaWMRotaryPosEmbed", _sana_wm),
    "HeliosTransformer3DModel": ("HeliosRotaryPosEmbed", _helios),
    "HunyuanVideoTransformer3DModel": ("HunyuanVideoRotaryPosEmbed", _by_latent),
    "HunyuanVideo15Transformer3DModel": ("HunyuanVideo15RotaryPosEmbed", _by_latent),
    "HunyuanVideoFramepackTransformer3DModel": ("HunyuanVideoFramepackRotaryPosEmbed", _framepack),
    "HunyuanImageTransformer2DModel": ("HunyuanImageRotaryPosEmbed", _hunyuan_image),
    "MotifVideoTransformer3DModel": ("MotifVideoRotaryPosEmbed", _by_latent),
    "JoyImageEditTransformer3DModel": ("get_rotary_pos_embed", _joy),
    "JoyImageEditPlusTransformer3DModel": ("_get_rotary_pos_embed_for_range", _joy),
    "Kandinsky5Transformer3DModel": ("Kandinsky5RoPE3D", _kandinsky),
    "Kandinsky6Transformer3DModel": ("Kandinsky6RoPE3D", _kandinsky),
    "Kandinsky6SRTransformer3DModel": ("Kandinsky6SRRoPE3D", _kandinsky),
    "CogVideoXTransformer3DModel": ("get_3d_rotary_pos_embed", _cog_video),
    "ConsisIDTransformer3DModel": ("get_3d_rotary_pos_embed", _cog_video),
    "EasyAnimateTransformer3DModel": ("EasyAnimateRotaryPosEmbed", _easy_animate),
    "HunyuanDiT2DModel": ("get_2d_rotary_pos_embed", _hunyuan_dit),
    "AllegroTransformer3DModel": ("get_3d_rotary_pos_embed_allegro", _allegro),
    "AceStepTransformer1DModel": ("_ace_step_rotary_freqs", _sound),
    "LongCatAudioDiTTransformer": ("AudioDiTRotaryEmbedding", _sound),
    "StableAudioDiTModel": ("get_1d_rotary_pos_embed", _sound),
    "StableAudio3DiTModel": ("StableAudio3RotaryEmbedding", _sound),
    "MiniMaxMusic3Transformer1DModel": ("MiniMaxMusic3RotaryEmbedding", _sound),
    "OmniGenTransformer2DModel": ("OmniGenSuScaledRotaryEmbedding", _omnigen),
}
"""By the class of a transformer: what computes its angles, and how that is run."""

OPTIONS: dict[str, dict[str, Any]] = {
    "CogVideoXTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "ConsisIDTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "EasyAnimateTransformer3DModel": {"patch_size": 2},
    "HiDreamImageTransformer2DModel": {"axes_dims_rope": (64, 32, 32), "patch_size": 2},
    "HunyuanDiT2DModel": {"patch_size": 2},
    "OmniGenTransformer2DModel": {
        "rope_scaling": {"short_factor": [1 + i / 50 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
    },
}
"""What a class needs beside its defaults: it has none for a patch or for a scaling, has no rotary positions by default,
or (HiDream) two axes for positions of three."""

SIZES = {
    **dict.fromkeys(("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"), (3, 30, 45)),
    "EasyAnimateTransformer3DModel": (3, 30, 45),
    "HunyuanDiT2DModel": (1, 32, 32),
    "Lumina2Transformer2DModel": (1, 12, 6),
    "QwenImage21Transformer2DModel": (1, 4, 6),
}
"""Where `GRID` is none that the model takes."""

HEADS = 2


@dataclass(frozen=True)
class Outcome:
    """How far what a model makes of numbers up to 1 is from exact angles, and from float32 ones; 0: the same bits."""

    exact: float
    float32: float

    @property
    def verdict(self) -> str:
        """Which of both is it."""
        if 0.0 in (self.exact, self.float32):
            return "same bits" if self.exact == 0 else "same bits in float32"
        return "equal" if min(self.exact, self.float32) <= ROTATED_TOKEN else "differs"


@functools.cache
def outcome(name: str) -> Outcome:
    """The rotation of a transformer beside that of its row."""
    rotary, run = CASES[name]
    config = {**defaults(name), **OPTIONS.get(name, {})}
    where = places(name, config)
    ids = where.index.reshape(1, where.seq_len, -1)[0]
    turn = run(name, rotary, config, ids if where.denominator == 1 else ids / where.denominator)
    return Outcome(*(_apart(encoding_from_diffusers(config, angles=mode), turn, where) for mode in MODES))


MODES: tuple[AngleMode, ...] = ("exact", "float32")


def _apart(encoding: Rotary, turn: Turn, where: Positions) -> float:
    encoding = encoding.for_length(TEXT + 40)
    generator = torch.Generator().manual_seed(0)
    q = 2 * torch.rand(1, HEADS, where.seq_len, encoding.head_dim, generator=generator) - 1
    ours, theirs = encoding.rotate_one(q, where), turn(q)
    assert ours.shape == theirs.shape
    return 0.0 if torch.equal(ours, theirs) else float((ours - theirs).abs().max())


def places(name: str, config: dict[str, Any]) -> Positions:
    """Of `GRID`, with `TEXT` where text is rotated."""
    row = TRANSFORMERS[name]
    frames, rows, columns = SIZES.get(name, GRID)
    axes = len(row.dims(config))
    sizes = {1: (1, 1, 40), 2: (1, rows, columns)}.get(axes, (frames, rows, columns))
    if name == "MiniMaxH3Transformer3DModel":
        return Positions.grid(*sizes)  # its own are no fractions
    return positions_from_diffusers(config, *sizes, text=TEXT if row.text is not None else 0)


DIFFERS = {
    "BriaFibo2Transformer2DModel": "angles of float64 are rounded to float32 before their cosine",
    "AnyFlowFARTransformer3DModel": "a compressed frame is in the middle of the patches that it joins",
    "ChronoEditTransformer3DModel": "the second of two frames is at position `rope_temporal_skip_len` - 1",
    "HeliosTransformer3DModel": "cosines of earlier frames are averaged, so this is not a rotation",
    "HunyuanVideoFramepackTransformer3DModel": "cosines of earlier frames are averaged, so this is not a rotation",
    "JoyImageEditTransformer3DModel": "with `rope_type` mrope, text continues after the largest index",
    "Kandinsky5Transformer3DModel": "q and k of every dtype are rounded to bfloat16",
    "LuminaNextDiT2DModel": "scaled by `Linear` up to a time of the diffusion, then by `NTK(form='base')`",
    "OmniGenTransformer2DModel": "each row of a batch has the positions of the first row, even if padded differently",
    "QwenImageTransformer2DModel": "with `use_layer3d_rope`, images are layers, and the last is at position -1",
    "SanaWMTransformer3DModel": "layers with camera input rotate half of a head",
    "WanAnimate2Transformer3DModel": "the reference comes after the image's columns, one frame later",
    "ZImageTransformer2DModel": "text and image are padded to multiples of 32 tokens",
}
"""What the code of a class does otherwise than its row, or in some cases only."""


def table() -> str:
    """The table of the guide."""
    lines = [
        "| transformer | layout | base | dimensions | equal | its rounding | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(CASES):
        row, config, result = TRANSFORMERS[name], {**defaults(name), **OPTIONS.get(name, {})}, outcome(name)
        base = row.base if isinstance(row.base, float) else float(config.get(*row.base))
        cells = (
            name.removesuffix("Model").removesuffix("Transformer3D").removesuffix("Transformer2D"),
            row.layout,
            f"{base:,.0f}",
            " ".join(map(str, row.dims(config))),
            result.verdict,
            "below 1e-5" if result.exact < SMALL_ROUNDING else f"{result.exact:.0e}",
            DIFFERS.get(name, ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
