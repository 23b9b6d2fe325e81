"""Every encoding by name: what it is, what it needs to know of a model, and where it comes from."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass

from locant.arguments import shown
from locant.errors import LocantError
from locant.positions.alibi import ALiBi
from locant.positions.base import PositionEncoding
from locant.positions.cope import Cope
from locant.positions.deberta import Deberta
from locant.positions.fire import Fire
from locant.positions.kerple import Kerple
from locant.positions.learned import Learned
from locant.positions.rotary import Rotary
from locant.positions.sandwich import Sandwich
from locant.positions.shaw import Shaw
from locant.positions.sinusoidal import Sinusoidal
from locant.positions.t5 import T5Bias
from locant.positions.transformer_xl import TransformerXL
from locant.positions.xpos import XPos

__all__ = ["CATALOG", "Entry", "ModelShape", "encoding", "find"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model from which an encoding takes those it needs."""

    d_model: int
    num_heads: int
    max_seq_len: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One encoding of the catalog.

    ``sizes`` are the fields of `ModelShape` that its constructor asks for.
    """

    name: str
    build: type[PositionEncoding]
    sizes: tuple[str, ...]
    doors: tuple[str, ...]
    parameters: str
    extrapolation: str
    used_by: str
    paper: str

    def for_model(self, shape: ModelShape, **options: object) -> PositionEncoding:
        """This encoding for a model of these sizes."""
        return _construct(self, {**{size: getattr(shape, size) for size in self.sizes}, **options})


CATALOG: tuple[Entry, ...] = (
    Entry(
        name="nope", build=PositionEncoding, sizes=(), doors=(), parameters="none",
        extrapolation="a causal mask alone gives order; some reach beyond the trained length",
        used_by="some layers of Llama 4, SmolLM3, Cohere Command", paper="Kazemnejad 2023, arXiv 2305.19466",
    ),
    Entry(
        name="learned", build=Learned, sizes=("max_seq_len", "d_model"), doors=("embed",),
        parameters="max_seq_len x d_model",
        extrapolation="none: there is no row past the table, and rows never trained mean nothing",
        used_by="BERT, GPT-2, GPT-3, OPT, RoBERTa", paper="Devlin 2018, arXiv 1810.04805",
    ),
    Entry(
        name="sinusoidal", build=Sinusoidal, sizes=("d_model",), doors=("embed",), parameters="none",
        extrapolation="defined everywhere, but models do not understand positions they never saw",
        used_by="the original Transformer, Whisper's encoder", paper="Vaswani 2017, arXiv 1706.03762",
    ),
    Entry(
        name="rotary", build=Rotary, sizes=("head_dim",), doors=("rotate",), parameters="none",
        extrapolation="poor beyond the trained length without a scaling of its frequencies",
        used_by="Llama, Mistral, Qwen, Gemma, DeepSeek, GPT-NeoX, GPT-J, Phi", paper="Su 2021, arXiv 2104.09864",
    ),
    Entry(
        name="xpos", build=XPos, sizes=("head_dim",), doors=("rotate",), parameters="none",
        extrapolation="better than rotary: the product of far tokens fades; made for windowed attention there",
        used_by="LeX, RetNet, TorchScale", paper="Sun 2022, arXiv 2212.10554",
    ),
    Entry(
        name="alibi", build=ALiBi, sizes=("num_heads",), doors=("bias",), parameters="none",
        extrapolation="good: loss stays near its short-length value, because far tokens fade",
        used_by="BLOOM, MPT, Falcon-RW, BTLM", paper="Press 2022, arXiv 2108.12409",
    ),
    Entry(
        name="t5", build=T5Bias, sizes=("num_heads",), doors=("bias",), parameters="num_buckets x num_heads",
        extrapolation="fair: all distances beyond max_distance share one bucket",
        used_by="T5, mT5, Flan-T5, UL2", paper="Raffel 2020, arXiv 1910.10683",
    ),
    Entry(
        name="kerple", build=Kerple, sizes=("num_heads",), doors=("bias",), parameters="2 x num_heads",
        extrapolation="good: far tokens fade as fast as each head learned",
        used_by="its paper's models", paper="Chi 2022, arXiv 2205.09921",
    ),
    Entry(
        name="fire", build=Fire, sizes=("num_heads",), doors=("bias",), parameters="a small MLP, c and L",
        extrapolation="good: distances are divided by the length, so the function sees nothing new",
        used_by="its paper's models", paper="Li 2023, arXiv 2310.04418",
    ),
    Entry(
        name="sandwich", build=Sandwich, sizes=("num_heads",), doors=("bias",), parameters="none",
        extrapolation="good: decays with the logarithm of the distance",
        used_by="its paper's models", paper="Chi 2023, arXiv 2212.10356",
    ),
    Entry(
        name="cope", build=Cope, sizes=("head_dim",), doors=("bias",), parameters="max_positions x head_dim",
        extrapolation="good where what is counted is rare; counts beyond max_positions are one",
        used_by="its paper's models", paper="Golovneva 2024, arXiv 2405.18719",
    ),
    Entry(
        name="shaw", build=Shaw, sizes=("head_dim",), doors=("bias",), parameters="(2 max_distance + 1) x head_dim",
        extrapolation="fair: all distances beyond max_distance share one vector",
        used_by="Music Transformer, Wav2Vec2-BERT, SeamlessM4T-v2", paper="Shaw 2018, arXiv 1803.02155",
    ),
    Entry(
        name="transformer_xl", build=TransformerXL, sizes=("num_heads", "d_model"), doors=("bias",),
        parameters="d_model x d_model, u and v",
        extrapolation="fair with a memory of earlier segments, which it was made for",
        used_by="Transformer-XL, XLNet, Conformer", paper="Dai 2019, arXiv 1901.02860",
    ),
    Entry(
        name="deberta", build=Deberta, sizes=("num_heads", "head_dim"), doors=("bias",),
        parameters="a table and two projections",
        extrapolation="fair: all distances beyond max_distance share one bucket",
        used_by="DeBERTa, DeBERTa-v2 and v3", paper="He 2021, arXiv 2006.03654",
    ),
)  # fmt: skip
"""All encodings, in the order of `locant list`."""


def find(name: str) -> Entry:
    """The entry of this name; an unknown one gets a "did you mean"."""
    entries = {entry.name: entry for entry in CATALOG}
    if isinstance(name, str) and name in entries:
        return entries[name]
    close = difflib.get_close_matches(str(name).lower(), entries, n=1, cutoff=0.5)
    hint = f"{close[0]!r}, did you mean that?" if close else "one of these names"
    raise LocantError(f"got encoding {shown(name)}, expected one of {', '.join(entries)}", hint)


def encoding(name: str, **options: object) -> PositionEncoding:
    """The encoding of this name, built with these options.

    >>> encoding("alibi", num_heads=8)
    ALiBi(num_heads=8)
    >>> encoding("rotery", head_dim=64)
    Traceback (most recent call last):
    ...
    locant.errors.LocantError: got encoding 'rotery', expected one of nope, learned, sinusoidal, rotary, xpos, alibi,
    t5, kerple, fire, sandwich, cope, shaw, transformer_xl, deberta; try: 'rotary', did you mean that?
    """
    return _construct(find(name), options)


def _construct(entry: Entry, options: dict[str, object]) -> PositionEncoding:
    takes_options = entry.build is not PositionEncoding
    accepted = inspect.signature(entry.build).parameters if takes_options else {}
    unknown = [option for option in options if option not in accepted]
    missing = [size for size in entry.sizes if size not in options]
    if unknown or missing:
        got = f"unknown options {unknown}" if unknown else f"no {' or '.join(missing)}"
        raise LocantError(
            f"got {got} for {entry.name!r}, which takes {', '.join(accepted) or 'no options'}",
            f"encoding({entry.name!r}" + "".join(f", {size}=..." for size in entry.sizes) + ")",
        )
    return entry.build(**options)
