"""The rotary modules of `transformers`, found, built from their own default configurations and run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from locant import LocantError, Positions, Rotary, ShapeError
from tests.tolerances import ROTATED_TOKEN

__all__ = [
    "Case", "Outcome", "called", "cases", "folders", "is_rotary", "layer_types_of", "one_of_each_code", "outcome",
    "said", "takes_positions", "theirs",
]  # fmt: skip

TOKENS, HEADS = 40, 2
CALLED_SO = re.compile(r"Rotary|Rope(?=[A-Z])|RoPE(?=[A-Z])")

Turn = Callable[[Tensor], Tensor]
"""From queries ``[1, heads, tokens, width]`` to rotated ones, in the order of channels in which they came."""


@dataclass(frozen=True)
class Case:
    """One rotary class, with one of the configurations that it is built from, for one type of layers."""

    folder: str
    cls: type[nn.Module]
    config: Any
    layer_type: str | None

    @property
    def name(self) -> str:
        of_layers = "" if self.layer_type is None else f", {self.layer_type}"
        return f"{self.cls.__name__}({type(self.config).__name__}{of_layers})"


@dataclass(frozen=True)
class Outcome:
    """``same bits``, ``equal`` (to 1e-6), ``differs`` or ``refused``, and how much or why."""

    verdict: str
    detail: str = ""


# ---------------------------------------------------------------------- finding them


@cache
def folders() -> tuple[str, ...]:
    """The model folders that define a rotary module, by name, without importing them."""
    files = sorted(_models().glob("*/modeling_*.py"))
    defined = re.compile(r"^class \w*(Rotary|Rope|RoPE)\w*\(", re.MULTILINE)
    return tuple(path.parent.name for path in files if defined.search(path.read_text()) and _is_main(path))


def _models() -> pathlib.Path:
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    return pathlib.Path(package.origin).parent / "models"


def one_of_each_code(names: Iterable[str]) -> set[str]:
    """Return the first of these folders with each code: most models of `transformers` hold a copy of Llama's."""
    first = dict[str, str]()
    for name in names:
        first.setdefault(_rotation_code(name), name)
    return {*first.values()}


@cache
def _rotation_code(folder: str) -> str:
    """Return the classes and functions of a folder that rotate, without what is no code and the model's name."""
    text = (_models() / folder / f"modeling_{folder}.py").read_text()
    found = [block[0] for block in BLOCK.finditer(text) if ROTATES.search(block["name"])]
    return "".join(sorted(NAME_OF_A_MODEL.sub("", NO_CODE.sub("", each)) for each in found))


BLOCK = re.compile(r"^(?:class|def) (?P<name>\w+).*?(?=^[^\s)]|\Z)", re.MULTILINE | re.DOTALL)
ROTATES = re.compile(r"Rotary|R[oO]P[eE](?=[A-Z])|rot|pos_emb")
NO_CODE = re.compile(r'^ *r?""".*?"""\n| *#[^\n]*$|^ *\n', re.MULTILINE | re.DOTALL)
"""Docstrings, comments and empty lines."""
NAME_OF_A_MODEL = re.compile(r"\w+(?=Rotary|Config\b|R[oO]P[eE](?=[A-Z]))")


def _is_main(path: pathlib.Path) -> bool:
    return path.stem == f"modeling_{path.parent.name}"


@cache
def cases(folder: str) -> list[Case]:
    """Its rotary modules, as far as they can be built."""
    code = _code(folder)
    found = [
        Case(folder, cls, config, layer_type)
        for name, cls in vars(code).items()
        if is_rotary(name, cls, code)
        for config in _configurations(folder, cls, code)
        for layer_type in layer_types_of(cls, config)
    ]
    return sorted(found, key=lambda case: case.name)


def _code(folder: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def is_rotary(name: str, cls: Any, code: ModuleType) -> bool:
    own = inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == code.__name__
    return bool(own and CALLED_SO.search(name) and ("Attention" not in name or name == "VJEPA2RopeAttention"))


HALF_OF_A_HEAD = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
OPTIONS: dict[str, dict[str, Any]] = {
    "Glm4vTextConfig": HALF_OF_A_HEAD,
    "Glm4vMoeTextConfig": {"num_attention_heads": 32, **HALF_OF_A_HEAD},
    "GlmImageTextConfig": HALF_OF_A_HEAD,
    "HunYuanVLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 16, 16, 16]}
    },
    "Qwen3OmniMoeTextConfig": {"num_attention_heads": 32},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
        }
    },
}
"""What a configuration has to be told where its own defaults cannot be run: sections of another number of pairs than
there are, a width of 73 dimensions per head, or no sections or rope parameters at all."""

OTHER_CONFIGURATIONS = {
    "Qwen2_5OmniRotaryEmbedding": ("Qwen2_5OmniTextConfig", "Qwen2_5OmniTalkerConfig"),
    "Qwen3OmniMoeRotaryEmbedding": ("Qwen3OmniMoeTalkerCodePredictorConfig", "Qwen3OmniMoeCode2WavConfig"),
    "Qwen3OmniMoeTalkerRotaryEmbedding": ("Qwen3OmniMoeTalkerTextConfig",),
}
"""Where the annotation names a configuration of other layers, and the folder has more that would fit."""


def _configurations(folder: str, cls: type[nn.Module], code: ModuleType) -> Iterator[Any]:
    """The one that the class is annotated with; where that cannot build it, all of the folder that can."""
    hint = next(iter([*inspect.signature(cls.__init__).parameters.values()][1:]), None)
    assert hint is not None
    named = getattr(code, str(hint.annotation), None) if isinstance(hint.annotation, str) else hint.annotation
    defined = vars(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"))
    other = OTHER_CONFIGURATIONS.get(cls.__name__)
    first = [named] if other is None else [defined[name] for name in other]
    rest = [kind for name, kind in defined.items() if name.endswith("Config") and kind.__module__.endswith(folder)]
    for kinds in (first, rest):
        built = [config for config in map(_default, kinds) if config is not None and _builds(cls, config)]
        if built:
            yield from built
            return


def _default(kind: Any) -> Any:
    try:
        return (
            kind(**OPTIONS.get(kind.__name__, {}))
            if inspect.isclass(kind) and kind is not inspect.Parameter.empty
            else None
        )
    except (TypeError, AttributeError, ValueError):
        return None


def _builds(cls: type[nn.Module], config: Any) -> bool:
    try:
        cls(config)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def layer_types_of(cls: type[nn.Module], config: Any) -> list[str | None]:
    """Those that have rope parameters of their own, and layers."""
    rope = getattr(config, "rope_parameters", None)
    nested = isinstance(rope, dict) and any(isinstance(one, dict) for one in rope.values())
    if not nested or rope is None:
        return [None]
    present = getattr(cls(config), "layer_types", rope)
    return [kind for kind, one in rope.items() if isinstance(one, dict) and kind in present]


# ---------------------------------------------------------------------- running them


def outcome(case: Case) -> Outcome:
    """Compare `Rotary.from_config` with this module."""
    try:
        rotary = Rotary.from_config(said(case), layer_type=case.layer_type, angles="float32")
    except LocantError as error:
        return Outcome("refused", str(error))
    index, turn = theirs(case)
    q = 2 * torch.rand(1, HEADS, TOKENS, rotary.head_dim, generator=torch.Generator().manual_seed(0)) - 1
    with torch.no_grad():
        try:
            expected = turn(q)
            ours = rotary.rotate_one(q, Positions.of(index))
        except (RuntimeError, ShapeError) as error:
            return Outcome("differs", f"{type(error).__name__}: {error}")
    if torch.equal(ours, expected):
        return Outcome("same bits")
    error = (ours - expected).abs().max().item()
    return Outcome("equal" if error <= ROTATED_TOKEN else "differs", f"{error:.1e}")


def said(case: Case) -> Any:
    """The configuration; of a sound model with a text model inside, what is said of the sound."""
    if "MusicFlamingo" not in case.cls.__name__:
        return case.config
    return {key: value for key, value in case.config.to_dict().items() if key != "text_config"}


def theirs(case: Case) -> tuple[Tensor, Turn]:
    """Return the positions of its tokens, and how it rotates them."""
    name = case.cls.__name__
    run = next((special for part, special in SPECIAL.items() if part in name), None)
    if run is not None:
        return run(case)
    if (turn := called(case)) is not None:
        axes = next((axes for part, axes in AXES.items() if part in name), None)
        index = torch.arange(TOKENS)[None] if axes is None else _index(axes)
        return index, partial(turn, index) if takes_positions(turn) else turn
    if hasattr(case.cls, "compute_axial_rope_parameters"):
        return _axial(case)
    return _text(case)


def _text(case: Case) -> tuple[Tensor, Turn]:
    """One index per token, or several where the module has sections of pairs."""
    module = case.cls(case.config)
    sections = getattr(module, "mrope_section", None)
    axes = len(sections) if isinstance(sections, list) else 3 if sections else 2 if "NeoMME" in case.cls.__name__ else 1
    index = _index(axes)
    given = index.movedim(-1, 0) if axes > 1 else index[..., 0]
    takes_layers = "layer_type" in inspect.signature(case.cls.forward).parameters
    options = {"layer_type": case.layer_type} if takes_layers else {}
    angles = module(torch.zeros(1, TOKENS, 1), given, **options)
    return (index if axes > 1 else index[..., 0]), _applied(case, angles)


def _index(axes: int) -> Tensor:
    """Apart on every axis, so that no two can be confused."""
    generator = torch.Generator().manual_seed(axes)
    return torch.randint(0, 60, (1, TOKENS, axes), generator=generator)


def _applied(case: Case, angles: Any) -> Turn:
    code, config = _code(case.folder), case.config
    if isinstance(angles, Tensor):
        if case.folder == "llama4":
            return lambda q: code.apply_rotary_emb(q.transpose(1, 2), q.transpose(1, 2), angles)[0].transpose(1, 2)
        return lambda q: code.apply_rotary_emb(q, q, angles)[0]
    cos, sin = angles
    latent = hasattr(code, "apply_rotary_pos_emb_interleave") and "Audio" not in case.cls.__name__
    if latent and getattr(config, "rope_interleave", True):
        return lambda q: _interleaved_again(code.apply_rotary_pos_emb_interleave(q, q, cos, sin)[0])
    names = [*inspect.signature(inspect.unwrap(code.apply_rotary_pos_emb)).parameters]
    if names[:3] == ["x", "cos", "sin"]:
        return _on_its_width(cos, lambda q: code.apply_rotary_pos_emb(q, cos, sin))
    return _on_its_width(cos, lambda q: code.apply_rotary_pos_emb(q, q, cos=cos, sin=sin)[0])


def _interleaved_again(x: Tensor) -> Tensor:
    """What this code leaves half after half, which scores do not see."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def _on_its_width(cos: Tensor, turn: Turn) -> Turn:
    """As attention classes do, whose function takes no more than the part of a head that is rotated."""

    def turned(q: Tensor) -> Tensor:
        try:
            return turn(q)
        except RuntimeError as error:
            if "must match" not in str(error):
                raise
        width = cos.shape[-1]
        return torch.cat([turn(q[..., :width]), q[..., width:]], -1)

    return turned


def _axial(case: Case) -> tuple[Tensor, Turn]:
    """Vision: a row and a column per patch, some with a frame before."""
    code, module = _code(case.folder), case.cls(case.config)
    index = _index(3 if "MiniMax" in case.cls.__name__ else 2)
    if "Gemma4" in case.cls.__name__:
        angles = module(torch.zeros(1), index)
        return index, lambda q: code.apply_multidimensional_rope(q.transpose(1, 2), *angles, index).transpose(1, 2)
    cos, sin = module(torch.zeros(1), index[0])
    function = next(
        getattr(code, name)
        for name in (
            "apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d", "apply_rotary_pos_emb_2d_self_attn",
            "apply_rotary_pos_emb",
        )
        if hasattr(code, name)
    )  # fmt: skip
    if function.__name__.endswith("vision"):
        return index, lambda q: function(q[0].transpose(0, 1), q[0].transpose(0, 1), cos, sin)[0].transpose(0, 1)[None]
    if case.folder == "pixtral":
        return index, lambda q: function(q, q, cos, sin, unsqueeze_dim=0)[0]
    return index, lambda q: function(q, q, cos, sin)[0]


# ---------------------------------------------------------------------- those that are called in a way of their own


def called(case: Case) -> Callable[..., Tensor] | None:
    """A module that is called in a way of its own, as a user would call it: by tokens, or by positions and tokens."""
    return next((make(case) for part, make in CALLED.items() if part in case.cls.__name__), None)


def takes_positions(turn: Callable[..., Tensor]) -> bool:
    return len(inspect.signature(turn).parameters) == 2


def _conformer(case: Case) -> Turn:
    """A method of attention turns what is still in one piece; tokens count from 0."""
    code, module = _code(case.folder), case.cls(case.config)
    attention = next(cls for cls in vars(code).values() if hasattr(cls, "_apply_rotary_embedding"))

    def turn(x: Tensor) -> Tensor:
        sizes = SimpleNamespace(num_heads=x.shape[1], head_size=x.shape[-1])
        angles = module(torch.zeros(1, x.shape[2], 1))
        turned = attention._apply_rotary_embedding(sizes, x.transpose(1, 2).flatten(2), angles)
        return turned.unflatten(-1, (x.shape[1], x.shape[-1])).transpose(1, 2)

    return turn


def _clvp(case: Case) -> Turn:
    code, module = _code(case.folder), case.cls(case.config)

    def turn(x: Tensor) -> Tensor:
        angles = module(torch.zeros(1, x.shape[2], 1))[0]
        part, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
        index = torch.arange(x.shape[2])[None]
        turned = code.apply_rotary_pos_emb(part, part, part, angles.cos(), angles.sin(), index)[0]
        return torch.cat([turned, rest], -1)

    return turn


def _centred(case: Case) -> tuple[Tensor, Turn]:
    """Patches of an image, from -1 to 1: in half patches from its centre, over the number of patches."""
    code, patch = _code(case.folder), case.config.patch_size
    size = case.config.image_size
    count = (size if isinstance(size, int) else size[0]) // (patch if isinstance(patch, int) else patch[0])
    cos, sin = case.cls(case.config).eval()(torch.zeros(1, 3, count * patch, count * patch))
    grid = torch.stack(torch.meshgrid(torch.arange(count), torch.arange(count), indexing="ij"), -1).flatten(0, 1)
    chosen = torch.randperm(count * count, generator=torch.Generator().manual_seed(0))[:TOKENS]
    index = (2 * grid + 1 - count)[chosen][None]
    return index, lambda q: code.apply_rotary_pos_emb(q, q, cos[chosen], sin[chosen])[0]


def _llama_4_vision(case: Case) -> tuple[Tensor, Turn]:
    """Rows and columns from 1; column first."""
    code, count = _code(case.folder), case.config.image_size // case.config.patch_size
    angles = case.cls(case.config)(torch.zeros(1))[:TOKENS]
    patch = torch.arange(TOKENS)
    index = torch.stack([patch // count + 1, patch % count + 1], -1)[None]
    return index, lambda q: code.vision_apply_rotary_emb(q.transpose(1, 2), q.transpose(1, 2), angles)[0].transpose(
        1, 2
    )


def _efficient_loftr(case: Case) -> tuple[Tensor, Turn]:
    """Rows and columns from 1, of a map of features that is made smaller before."""
    code, step = _code(case.folder), case.config.q_aggregation_stride
    rows, columns = 5, 8
    cos, sin = case.cls(case.config)(torch.zeros(1, 1, rows * step, columns * step))
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).flatten(0, 1)
    cos, sin = (x.flatten(1, 2) for x in (cos, sin))
    return grid[None] + 1, lambda q: code.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin, 2)[
        0
    ].transpose(1, 2)


def _diffusion_transformer(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """Only the first head of these is rotated."""
    code, module = _code(case.folder), case.cls(case.config)

    def turn(positions: Tensor, x: Tensor) -> Tensor:
        cos, sin = module(torch.zeros(1, x.shape[2], 1), positions)
        one = code.deinterleave_head_dim(x[:, :1])
        return torch.cat([_interleaved_again(code.apply_rotary_pos_emb(one, one, cos, sin)[0]), x[:, 1:]], 1)

    return turn


def _music_flamingo(case: Case) -> tuple[Tensor, Turn]:
    """Features of sound at a time in seconds: frame x window and frame x place in the window."""
    code: Any = _code(case.folder)
    step, window, place = 4 * case.config.audio_frame_step, 2, torch.arange(TOKENS)
    frame = window * TOKENS + place
    cos, sin = case.cls(case.config)((frame * step)[None], TOKENS)
    index = torch.stack([frame * window, frame * place], -1)[None]
    return index, lambda q: code.apply_rotary_time_emb(q, cos[:, None], sin[:, None])


def _esm_fold_2(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """An atom's place in space and the number of its molecule; whole numbers here."""
    code, module = _code(case.folder), case.cls(case.config)

    def turn(index: Tensor, x: Tensor) -> Tensor:
        cos, sin = module(index[..., :3].float(), index[..., 3], torch.float32)
        return code.apply_rotary_pos_emb(x, x, cos, sin)[0]

    return turn


def _v_jepa_2(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    attention: Any = case.cls(case.config, case.config.hidden_size, case.config.num_attention_heads)

    def turn(index: Tensor, x: Tensor) -> Tensor:
        return attention.apply_rotary_embeddings(x, tuple(axis.expand(1, x.shape[1], -1) for axis in index.unbind(-1)))

    return turn


def _gpt_j(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """The module gives a sine and a cosine for each pair, and its function turns a part of the head."""
    code, module = _code(case.folder), case.cls(case.config)

    def turn(index: Tensor, x: Tensor) -> Tensor:
        sin, cos = module(x, index)
        width = 2 * sin.shape[-1]
        part = code.apply_rotary_pos_emb(x[..., :width].transpose(1, 2), sin, cos).transpose(1, 2)
        return torch.cat([part, x[..., width:]], -1)

    return turn


CALLED: dict[str, Callable[[Case], Callable[..., Tensor]]] = {
    "RotaryPositionalEmbedding": lambda case: (_clvp if case.folder == "clvp" else _conformer)(case),
    "GPTJ": _gpt_j,
    "CodeGen": _gpt_j,
    "DiTRotary": _diffusion_transformer,
    "EsmFold2": _esm_fold_2,
    "VJEPA2": _v_jepa_2,
}
AXES = {"EsmFold2": 4, "VJEPA2": 3}

SPECIAL: dict[str, Callable[[Case], tuple[Tensor, Turn]]] = {
    "RopePositionEmbedding": _centred,
    "EomtDinov3": _centred,
    "Llama4Vision": _llama_4_vision,
    "EfficientLoFTR": _efficient_loftr,
    "MusicFlamingo": _music_flamingo,
}
