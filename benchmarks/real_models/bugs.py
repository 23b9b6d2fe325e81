"""The position bugs that `cost_of_bugs` puts into a running model of `transformers`, with their threads.

A bug changes one seam of the model while its context is open:

- *tables*: a hook on the rotary module computes other cosines and sines;
- *rotation*: another function rotates queries and keys by the right tables;
- *configuration*: the rotary module is built from a configuration with a mistake;
- *layers*: layers have the type, the window or the norm of another place;
- *rows*: the tokens of a window are arranged otherwise, as in packed or padded batches.

`entries` are numbers in `tests/known_bugs`. Each source is a thread about this mechanism.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BUGS", "DOCUMENTS", "EXTENDED", "IGNORED", "SCENARIOS", "Arrangement", "Bug", "Call", "Scenario"]

Spoil = Callable[[Any], AbstractContextManager[object]]
Tables = tuple[Tensor, Tensor]
Batch = Callable[[int, int], dict[str, Tensor]]
"""The arguments of a model's call, by a length and the id of padding."""

DOCUMENTS = 4
"""The number of documents in a packed row. The same share of a padded row is padding."""
IGNORED = -100


class Call(NamedTuple):
    """A call of a rotary module: positions ``[rows, tokens]``, its frequencies ``[pairs]``, and the type of layers."""

    positions: Tensor
    frequencies: Tensor
    layer_type: str | None
    module: nn.Module


class Arrangement(NamedTuple):
    """The tokens that a model reads, ``[rows, tokens]``, and its targets. Targets of -100 do not count."""

    ids: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A use of a model, and its correct reading.

    Args:
        arrange: makes what the model reads from a window of tokens ``[length + 1]`` and the id of padding.
        config: changes the configuration of the published model, if the model is another.
        length: the length of its windows, if it has one length of its own.
    """

    arrange: Callable[[Tensor, int], Arrangement]
    config: Callable[[Any], None] | None = None
    length: int | None = None

    @property
    def correct(self) -> Bug:
        """Return the correct reading, in the form of a bug."""
        name = next(name for name, scenario in SCENARIOS.items() if scenario is self)
        spoil = nullcontext if self.config is None else _replaced_config(self.config)
        return Bug(sentence="it is read correctly", scenario=name, spoil=spoil, config=self.config)


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A position bug.

    Args:
        sentence: what the code with the bug does.
        entries: numbers in `tests/known_bugs`.
        source: a thread where it happened, as ``owner/repository#number``, or an empty string.
        spoil: returns a context in which the model has the bug.
        scenario: the use of the model, a key of `SCENARIOS`.
        arrange: another arrangement of the tokens than that of the scenario.
        models: the models that can have it.
        batch: the arguments of the model's call, for bugs that a batch shows.
        config: changes a configuration, for bugs that a configuration shows.
        kernel: the function that norms and rotates queries and keys with this bug, and what `probe` has to know of it.
    """

    sentence: str
    entries: tuple[str, ...] = ()
    source: str = ""
    spoil: Spoil = nullcontext
    scenario: str = "text"
    arrange: Callable[[Tensor, int], Arrangement] | None = None
    models: tuple[str, ...] = ("smollm2", "gemma3")
    batch: Batch | None = None
    config: Callable[[Any], None] | None = None
    kernel: Callable[[Any], tuple[Callable[..., Tables], dict[str, Any]]] | None = None


def rotary_module(model: Any) -> nn.Module:
    """Return the module that makes the tables of a model."""
    return model.get_decoder().rotary_emb


def usual(positions: Tensor, frequencies: Tensor) -> Tables:
    """Return cosines and sines ``[rows, tokens, pairs]`` as the model computes them, in float32."""
    angles = positions[..., None].float() * frequencies.float()
    return angles.cos(), angles.sin()


def _tables(change: Callable[[Call], Tables]) -> Spoil:
    """Return a bug of the tables."""

    @contextmanager
    def spoil(model: Any) -> Generator[None]:
        rotary = rotary_module(model)

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tables) -> Tables:
            names = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
            layer_type = names.get("layer_type")
            frequencies = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
            cos, sin = change(Call(names["position_ids"], frequencies, layer_type, module))
            return torch.cat([cos, cos], -1).to(output[0].dtype), torch.cat([sin, sin], -1).to(output[1].dtype)

        handle = rotary.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    return spoil


def _positions(change: Callable[[Tensor], Tensor]) -> Spoil:
    """Return a bug of the positions alone, ``[1, tokens]`` to ``[1 or rows, tokens]``. The mask stays as it was."""
    return _tables(lambda call: usual(change(call.positions), call.frequencies))


def _rounded(
    positions: torch.dtype = torch.float32, frequencies: torch.dtype = torch.float32,
    product: torch.dtype = torch.float32, tables: torch.dtype = torch.float32,
) -> Spoil:  # fmt: skip
    """Return a bug of rounding: each step in its dtype. Tables have the dtype of the product, or a narrower one."""

    def change(call: Call) -> Tables:
        factors = call.positions[..., None].to(positions), call.frequencies.to(frequencies)
        angles = factors[0].to(product) * factors[1].to(product)
        return angles.cos().to(tables).float(), angles.sin().to(tables).float()

    return _tables(change)


def _exact(call: Call) -> Tables:
    """Return the tables of angles in float64, from frequencies in float64."""
    base = _base(call)
    count = len(call.frequencies)
    frequencies = torch.tensor([base ** (-pair / count) for pair in range(count)], dtype=torch.float64)
    angles = call.positions[..., None].double() * frequencies
    return angles.cos().float(), angles.sin().float()


def _base(call: Call) -> float:
    config: Any = call.module.config
    rope = config.rope_parameters
    return float((rope if call.layer_type is None else rope[call.layer_type])["rope_theta"])


def tf32(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to the ten bits of mantissa of TF32, halves away from zero."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _in_tf32(call: Call) -> Tables:
    return usual(tf32(call.positions), tf32(call.frequencies))


def _lengthened(factor: float) -> Spoil:
    """Return the bug that cosines and sines are multiplied by a factor."""

    def change(call: Call) -> Tables:
        cos, sin = usual(call.positions, call.frequencies)
        return cos * factor, sin * factor

    return _tables(change)


def _half_still(call: Call) -> Tables:
    """Leave the second half of the pairs unrotated."""
    frequencies = call.frequencies.clone()
    frequencies[len(frequencies) // 2 :] = 0
    return usual(call.positions, frequencies)


def _other_layers(layer_type: str) -> Spoil:
    """Return the bug that all layers have the frequencies of one type of layers."""
    return _tables(lambda call: usual(call.positions, getattr(call.module, f"{layer_type}_inv_freq")))


Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], Tables]


def _rotation(change: Callable[[Rotate, Tensor, Tensor, Tensor, Tensor], Tables]) -> Spoil:
    """Return a bug of the rotation. `change` gets the right function, q, k, cosines and sines."""

    @contextmanager
    def spoil(model: Any) -> Generator[None]:
        module: Any = sys.modules[type(model).__module__]
        right = module.apply_rotary_pos_emb

        def wrong(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Tables:
            return change(lambda *four: right(*four, *args, **kwargs), q, k, cos, sin)

        module.apply_rotary_pos_emb = wrong
        try:
            yield
        finally:
            module.apply_rotary_pos_emb = right

    return spoil


def _to_neighbours(x: Tensor) -> Tensor:
    """Put the members of each pair of the half layout beside each other."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _to_halves(x: Tensor) -> Tensor:
    """Put neighbours at the distance of half a head."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _as_neighbours(rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tables:
    q, k = rotate(_to_halves(q), _to_halves(k), cos, sin)
    return _to_neighbours(q), _to_neighbours(k)


def _as_halves(rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tables:
    q, k = rotate(_to_neighbours(q), _to_neighbours(k), cos, sin)
    return _to_halves(q), _to_halves(k)


def _keys_late(rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tables:
    """Rotate each key as if it were one position later. The last two share a position: the table ends there."""
    later = [torch.cat([table[..., 1:, :], table[..., -1:, :]], -2) for table in (cos, sin)]
    return rotate(q, k, cos, sin)[0], rotate(q, k, *later)[1]


def _half_of_the_heads(rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tables:
    """Leave the second half of the heads of queries unrotated, and of keys, of which there are at least one."""
    rotated = rotate(q, k, cos, sin)
    heads = [math.ceil(x.shape[1] / 2) for x in (q, k)]
    return tuple(  # pyright: ignore[reportReturnType]
        torch.cat([new[:, :count], old[:, count:]], 1) for new, old, count in zip(rotated, (q, k), heads, strict=True)
    )


def _replaced_config(edit: Callable[[Any], None]) -> Spoil:
    """Return the bug that the rotary module is built from another configuration."""

    @contextmanager
    def spoil(model: Any) -> Generator[None]:
        decoder, config = model.get_decoder(), copy.deepcopy(model.config)
        edit(config)
        right = decoder.rotary_emb
        decoder.rotary_emb = type(right)(config)
        try:
            yield
        finally:
            decoder.rotary_emb = right

    return spoil


def _rope(**changes: Any) -> Callable[[Any], None]:
    """Return an edit of the rotary settings of all layers. A function gets the old base."""

    def edit(config: Any) -> None:
        rope = config.rope_parameters
        for settings in [rope] if "rope_theta" in rope else rope.values():
            new = {name: value(settings["rope_theta"]) if callable(value) else value for name, value in changes.items()}
            settings.update(new)

    return edit


def _configured(sentence: str, edit: Callable[[Any], None], **other: Any) -> Bug:
    return Bug(sentence=sentence, spoil=_replaced_config(edit), config=edit, **other)


def _yarn(factor: float, length: int, **more: Any) -> Callable[[Any], None]:
    return _rope(rope_type="yarn", factor=factor, original_max_position_embeddings=length, **more)


def _exchanged(layer_type: str) -> str:
    return {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}[layer_type]


def _exchange(config: Any) -> None:
    config.layer_types = [_exchanged(each) for each in config.layer_types]


@contextmanager
def _layers_exchanged(model: Any) -> Generator[None]:
    right = model.config.layer_types
    _exchange(model.config)
    try:
        yield
    finally:
        model.config.layer_types = right


def _mask_of(used: str, instead_of: str) -> Spoil:
    """Return the bug that one kind of mask takes the place of the other."""

    @contextmanager
    def spoil(model: Any) -> Generator[None]:
        module: Any = sys.modules[type(model).__module__]
        right = getattr(module, instead_of)
        setattr(module, instead_of, getattr(module, used))
        try:
            yield
        finally:
            setattr(module, instead_of, right)

    return spoil


@contextmanager
def _norm_after_rotation(model: Any) -> Generator[None]:
    """Rotate queries and keys first and norm each head then."""
    layers = [layer.self_attn for layer in model.get_decoder().layers]
    norms = [(layer.q_norm, layer.k_norm) for layer in layers]
    current: list[tuple[nn.Module, nn.Module]] = []

    def remember(number: int) -> Callable[..., None]:
        return lambda *_: current.__setitem__(slice(None), [norms[number]])

    handles = [layer.register_forward_pre_hook(remember(number)) for number, layer in enumerate(layers)]

    def change(rotate: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tables:
        q, k = rotate(q, k, cos, sin)
        return current[0][0](q), current[0][1](k)

    for layer in layers:
        layer.q_norm, layer.k_norm = nn.Identity(), nn.Identity()
    try:
        with _rotation(change)(model):
            yield
    finally:
        for handle, layer, (q_norm, k_norm) in zip(handles, layers, norms, strict=True):
            handle.remove()
            layer.q_norm, layer.k_norm = q_norm, k_norm


def _kernel_that_norms_last(model: Any) -> tuple[Callable[..., Tables], dict[str, Any]]:
    """Return the function of `_norm_after_rotation` for the last layer of Gemma, and the norm that it should have.

    The norms have random weights. Some factors of the trained ones are 0, after which nothing can be measured.
    """
    decoder = model.get_decoder()
    layer, code = decoder.layers[-1].self_attn, sys.modules[type(model).__module__]
    q_norm, k_norm = copy.deepcopy((layer.q_norm, layer.k_norm))
    for seed, norm in enumerate((q_norm, k_norm)):
        norm.weight.data = torch.rand(norm.weight.shape, generator=torch.Generator().manual_seed(seed)) - 0.5

    def kernel(q: Tensor, k: Tensor, positions: Tensor) -> Tables:
        tables = decoder.rotary_emb(q, positions, layer.layer_type)
        q, k = code.apply_rotary_pos_emb(q, k, *tables)
        return q_norm(q), k_norm(k)

    return kernel, {"norm": (q_norm.weight, k_norm.weight), "eps": q_norm.eps, "plus_one": True}


def _as_text(ids: Tensor, pad: int) -> Arrangement:
    return Arrangement(ids[None, :-1], ids[None, 1:])


def _apart(ids: Tensor, pad: int) -> Arrangement:
    """Return a row for each document. The last token of a document has no target."""
    rows, targets = ids[:-1].view(DOCUMENTS, -1), ids[1:].view(DOCUMENTS, -1).clone()
    targets[:, -1] = IGNORED
    return Arrangement(rows, targets)


def _in_one_row(ids: Tensor, pad: int) -> Arrangement:
    rows, targets = _apart(ids, pad)
    return Arrangement(rows.reshape(1, -1), targets.reshape(1, -1))


def _num_pads(length: int) -> int:
    return length // DOCUMENTS


def _unpadded(ids: Tensor, pad: int) -> Arrangement:
    """Return the tokens that are left of a window if its first quarter is padding."""
    return _as_text(ids[: len(ids) - _num_pads(len(ids) - 1)], pad)


def _padded(ids: Tensor, pad: int) -> Arrangement:
    """Return the same tokens after padding, which has no targets."""
    row, targets = _unpadded(ids, pad)
    count = _num_pads(len(ids) - 1)
    return Arrangement(
        torch.cat([torch.full((1, count), pad), row], 1), torch.cat([torch.full((1, count), IGNORED), targets], 1)
    )


def _half(positions: Tensor) -> int:
    return positions.shape[-1] // 2


def _behind_half(step: int) -> Callable[[Tensor], Tensor]:
    return lambda positions: positions + step * (positions >= _half(positions))


def _by_rank(positions: Tensor) -> Tensor:
    """Number the quarters of a row as two ranks do that hold the first and last, and the middle two, in their order."""
    quarter = positions.shape[-1] // 4
    places = torch.tensor([0, 2, 3, 1], device=positions.device)
    return places[(positions // quarter).clamp(max=3)] * quarter + positions % quarter


def _count_on(positions: Tensor) -> Tensor:
    """Number the tokens of each row from where the row before it ends."""
    length = positions.shape[-1]
    return positions[:1] + length * torch.arange(DOCUMENTS, device=positions.device)[:, None]


def _ids_batch(change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the arguments of a call with these ids, and with a mask of ones: the row is one document."""

    def batch(length: int, pad: int) -> dict[str, Tensor]:
        ids = change(torch.arange(length)[None])
        return {"input_ids": torch.full_like(ids, pad + 1), "position_ids": ids, "attention_mask": torch.ones_like(ids)}

    return batch


def _packed_batch(restart: bool, separated: bool) -> Batch:
    """Return the arguments of a call for a packed row, with a mask of four axes."""

    def batch(length: int, pad: int) -> dict[str, Tensor]:
        ids, document = torch.arange(length)[None], torch.arange(length) // (length // DOCUMENTS)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        if separated:
            visible &= document[:, None] == document
        ids = ids % (length // DOCUMENTS) if restart else ids
        return {"input_ids": torch.full_like(ids, pad + 1), "position_ids": ids, "attention_mask": visible[None, None]}

    return batch


def _padded_batch(masked: bool) -> Batch:
    """Return the arguments of a call for a row that begins with padding, which its ids count."""

    def batch(length: int, pad: int) -> dict[str, Tensor]:
        ids = torch.arange(length)[None]
        mask = (ids >= _num_pads(length)).long()
        tokens = {"input_ids": pad + mask, "position_ids": ids}
        return {**tokens, "attention_mask": mask} if masked else tokens

    return batch


EXTENDED = 12_288
TRAINED = 8192
SCENARIOS = {
    "text": Scenario(arrange=_as_text),
    "packed": Scenario(arrange=_apart),
    "padded": Scenario(arrange=_unpadded),
    "extended": Scenario(arrange=_as_text, config=_yarn(2.0, TRAINED), length=EXTENDED),
}
"""The uses of a model: a text, packed documents, a row that begins with padding, a text for a model with YaRN."""

GAP = 128
LLAMA, GEMMA = ("smollm2",), ("gemma3",)

BUGS: dict[str, Bug] = {
    "exact-angles": Bug(
        sentence="angles are computed exactly instead of in float32 (an improvement, not a bug)", entries=("11",),
        spoil=_tables(_exact),
    ),
    "frequencies-bfloat16": Bug(
        sentence="frequencies are rounded to bfloat16, as by a cast of the whole model", entries=("8", "13", "14"),
        source="deepspeedai/DeepSpeed#8066", spoil=_rounded(frequencies=torch.bfloat16),
    ),
    "frequencies-float16": Bug(
        sentence="frequencies are rounded to float16", entries=("1", "3"), source="EleutherAI/gpt-neox#1003",
        spoil=_rounded(frequencies=torch.float16),
    ),
    "positions-bfloat16": Bug(
        sentence="positions are counted in bfloat16, where 256 and 257 are equal", entries=("7",),
        source="huggingface/diffusers#13920", spoil=_rounded(positions=torch.bfloat16),
    ),
    "positions-float16": Bug(
        sentence="positions are counted in float16, where 2,048 and 2,049 are equal", entries=("7",),
        spoil=_rounded(positions=torch.float16),
    ),
    "product-bfloat16": Bug(
        sentence="position × frequency is computed in bfloat16, as under autocast", entries=("2",),
        source="huggingface/transformers#29285", spoil=_rounded(product=torch.bfloat16),
    ),
    "product-float16": Bug(
        sentence="position × frequency is computed in float16", entries=("2",),
        spoil=_rounded(product=torch.float16),
    ),
    "product-tf32": Bug(
        sentence="position × frequency is a matrix product in TF32", entries=("5",),
        source="huggingface/transformers#48428", spoil=_tables(_in_tf32),
    ),
    "tables-bfloat16": Bug(
        sentence="cosines and sines are rounded to bfloat16", entries=("12",),
        source="Dao-AILab/flash-attention#823", spoil=_rounded(tables=torch.bfloat16),
    ),
    "tables-float16": Bug(
        sentence="cosines and sines are rounded to float16", entries=("12",),
        source="Dao-AILab/flash-attention#823", spoil=_rounded(tables=torch.float16),
    ),
    "base-10000": _configured(
        "the base is 10,000, the usual default, instead of the base in the configuration", _rope(rope_theta=1e4),
        entries=("51", "118"), source="deepspeedai/DeepSpeed#8345", models=LLAMA,
    ),
    "base-times-10": _configured(
        "the base is ten times as large", _rope(rope_theta=lambda base: 10 * base), entries=("51",),
    ),
    "linear-unasked": _configured(
        "positions are divided by 4 (linear scaling) in a model that was not trained so",
        _rope(rope_type="linear", factor=4.0), entries=("40",),
    ),
    "ntk-unasked": _configured(
        "NTK scaling by 4 acts within the trained length", _rope(rope_theta=lambda base: base * 4.0 ** (64 / 62)),
        entries=("40",), source="vllm-project/vllm#3488", models=LLAMA,
    ),
    "yarn-unasked": _configured(
        "YaRN by 4 acts within the trained length", _yarn(4.0, TRAINED), entries=("40", "47"),
        models=LLAMA,
    ),
    "rotated-twice": Bug(
        sentence="queries and keys are rotated twice, so every distance is doubled",
        spoil=_positions(lambda positions: 2 * positions),
    ),
    "attention-factor": Bug(
        sentence="cosines and sines are multiplied by 1.2, an attention factor that the model was not trained with",
        entries=("42",), source="vllm-project/vllm#46280", spoil=_lengthened(1.2),
    ),
    "not-rotated": Bug(
        sentence="nothing is rotated, so the model has no positions", entries=("66",),
        source="linkedin/Liger-Kernel#342", spoil=_positions(torch.zeros_like),
    ),
    "half-as-interleaved": Bug(
        sentence="pairs are neighbours in code for weights whose pairs are halves", entries=("52", "54"),
        source="karpathy/nanochat#264", spoil=_rotation(_as_neighbours),
    ),
    "interleaved-as-half": Bug(
        sentence="pairs are halves in code for weights whose pairs are neighbours", entries=("53", "109"),
        source="WestWaters/pollard-weights#70", spoil=_rotation(_as_halves),
    ),
    "direction-reversed": Bug(
        sentence="pairs are rotated in the other direction",
        spoil=_tables(lambda call: usual(-call.positions, call.frequencies)),
    ),
    "keys-off-by-one": Bug(
        sentence="keys are rotated one position further than queries", entries=("75",), source="vllm-project/vllm#945",
        spoil=_rotation(_keys_late),
    ),
    "pairs-not-rotated": Bug(
        sentence="the slower half of the pairs is not rotated", entries=("56", "113"),
        spoil=_tables(_half_still),
    ),
    "frequencies-of-twice-the-width": Bug(
        sentence="frequencies are those of a head of twice the width", entries=("55",), source="pie-project/pie#603",
        spoil=_tables(lambda call: usual(call.positions, call.frequencies.sqrt())),
    ),
    "heads-not-rotated": Bug(
        sentence="the second half of the heads is not rotated", entries=("112",), source="vllm-project/vllm#51049",
        spoil=_rotation(_half_of_the_heads),
    ),
    "restarts": Bug(
        sentence="positions begin at 0 again in the middle of a text, as in a second chunk or on a second rank",
        entries=("116",), source="huggingface/optimum-intel#187",
        spoil=_positions(lambda positions: positions % _half(positions)),
        batch=_ids_batch(lambda ids: ids % _half(ids)),
    ),
    "ranks-in-wrong-order": Bug(
        sentence="two ranks hold the first and last, and the middle two quarters, and number them in their own order",
        entries=("114",), source="volcengine/verl#6267", spoil=_positions(_by_rank), batch=_ids_batch(_by_rank),
    ),
    "gap": Bug(
        sentence=f"tokens behind the prompt count {GAP} slots of padding, which the prompt does not count",
        entries=("73", "100"), source="mosaicml/examples#257", spoil=_positions(_behind_half(GAP)),
        batch=_ids_batch(_behind_half(GAP)),
    ),
    "position-repeated": Bug(
        sentence="the first token behind the prompt has the position of the last token of the prompt",
        entries=("75",), source="vllm-project/vllm#945", spoil=_positions(_behind_half(-1)),
        batch=_ids_batch(_behind_half(-1)),
    ),
    "packed-count-goes-on": Bug(
        sentence="positions go on across packed documents, which do not see each other", entries=("77",),
        source="allenai/OLMo-core#591", scenario="packed", spoil=_positions(_count_on),
        batch=_packed_batch(restart=False, separated=True),
    ),
    "packed-documents-visible": Bug(
        sentence="packed documents see each other, and positions begin at 0 in each", entries=("121",),
        source="huggingface/nanoVLM#204", scenario="packed", arrange=_in_one_row,
        spoil=_positions(lambda positions: positions % (positions.shape[-1] // DOCUMENTS)),
        batch=_packed_batch(restart=True, separated=False),
    ),
    "packed-as-one-text": Bug(
        sentence="packed documents see each other, and positions go on: they are read as one text",
        entries=("78",), source="modelscope/ms-swift#9904", scenario="packed", arrange=_in_one_row,
        batch=_packed_batch(restart=False, separated=False),
    ),
    "padding-counted": Bug(
        sentence="positions count the padding before a row, which is masked", entries=("72",),
        source="huggingface/transformers#22161", scenario="padded",
        spoil=_positions(lambda positions: positions + positions.shape[-1] // (DOCUMENTS - 1)),
        batch=_padded_batch(masked=True),
    ),
    "padding-visible": Bug(
        sentence="the padding before a row is not masked", entries=("72",), source="ml-explore/mlx-lm#1906",
        scenario="padded", arrange=_padded, batch=_padded_batch(masked=False),
    ),
    "scaling-missing": _configured(
        "the scaling is missing: the published model reads 1.5 times its trained length", lambda config: None,
        entries=("49", "50", "101"), source="huggingface/transformers#32330", scenario="extended", models=LLAMA,
    ),
    "scaling-other-factor": _configured(
        "YaRN has the factor 8 instead of 2", _yarn(8.0, TRAINED), entries=("50",),
        source="TransformerLensOrg/TransformerLens#764", scenario="extended", models=LLAMA,
    ),
    "scaling-other-length": _configured(
        "YaRN by 2 has a trained length of 2,048 instead of 8,192", _yarn(2.0, 2048), entries=("45",),
        scenario="extended", models=LLAMA,
    ),
    "scaling-without-factor": _configured(
        "YaRN by 2 has no attention factor", _yarn(2.0, TRAINED, attention_factor=1.0), entries=("41", "104"),
        source="turboderp-org/exllamav3#259", scenario="extended", models=LLAMA,
    ),
    "scaling-factor-twice": _configured(
        "YaRN's attention factor is multiplied twice",
        _yarn(2.0, TRAINED, attention_factor=(0.1 * math.log(2) + 1) ** 2), entries=("43", "41"),
        source="sgl-project/sglang#33558", scenario="extended", models=LLAMA,
    ),
    "local-base-everywhere": Bug(
        sentence="full layers have the frequencies of sliding layers", entries=("51",),
        spoil=_other_layers("sliding_attention"), models=GEMMA,
    ),
    "global-base-everywhere": Bug(
        sentence="sliding layers have the frequencies of full layers", entries=("51",),
        spoil=_other_layers("full_attention"), models=GEMMA,
    ),
    "layers-exchanged": Bug(
        sentence="sliding and full layers are exchanged", source="NVIDIA-NeMo/Megatron-Bridge#4875",
        spoil=_layers_exchanged, models=GEMMA, config=_exchange,
    ),
    "window-missing": Bug(
        sentence="sliding layers see the whole text", source="EricLBuehler/mistral.rs#2094",
        spoil=_mask_of("create_causal_mask", "create_sliding_window_causal_mask"), models=GEMMA,
    ),
    "window-everywhere": Bug(
        sentence="full layers see only the window", source="cactus-compute/cactus#320", models=GEMMA,
        spoil=_mask_of("create_sliding_window_causal_mask", "create_causal_mask"),
    ),
    "norm-after-rotation": Bug(
        sentence="heads are normed after they are rotated, not before", entries=("115",),
        source="vllm-project/vllm-metal#660", spoil=_norm_after_rotation, models=GEMMA,
        kernel=_kernel_that_norms_last,
    ),
}  # fmt: skip
"""The bugs by id. An id of a row of the recorded result and of a kind of warning is one of these."""
