"""Generate text with a decoder of the lab, or with any module that turns ids into logits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, Integer
from numpy import ndarray
from torch import Tensor, nn

from locant.arguments import Real, real, shape_error, short_repr, whole
from locant.attention import KVCache
from locant.errors import LocantError, RangeError, Remedy, ShapeError
from locant.lab.decoder import Decoder
from locant.spelling import dtype_name

T = TypeVar("T")

LENGTHS = ("block_size", "context_length", "max_seq_len", "max_position_embeddings", "n_positions", "n_ctx")
"""Names under which models and their configurations state the largest number of tokens that they can read."""


@torch.no_grad()
def generate(
    model: Decoder | Callable[[Tensor], Any],
    ids: Integer[Tensor, "*batch seq"] | Integer[ndarray, "*batch seq"] | Sequence[int],
    num_tokens: int,
    *,
    temperature: Real = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    max_seq_len: int | None = None,
) -> Int[Tensor, "*batch longer"]:
    """Draw `num_tokens` tokens from a model one by one. Return the given ids, followed by these tokens.

    A `Decoder` computes each token once. If its encoding needs whole texts, or if `max_seq_len` is given, it computes
    all tokens again for each new token. Any other module is called as ``model(ids)`` with the whole row for each new
    token.

    Args:
        model: a `Decoder`, or a module or function that turns ids ``(batch, seq)`` into logits
            ``(batch, seq, vocab_size)``, or ``(batch, 1, vocab_size)`` for the last token. It may return them in a
            tuple before other values, or as the entry ``logits`` of a dictionary or of an output of `transformers`.
        ids: the prompt, as one row or a batch of rows with equal lengths.
        temperature: scores are divided by the temperature before the softmax. With 0, the most probable token is taken.
        top_k: draw only from the `top_k` most probable tokens.
        seed: the seed of the draws. The same seed gives the same tokens.
        max_seq_len: the largest number of tokens that the model reads. If a row is longer, the model reads only its
            last tokens, with positions from 0. By default, a `Decoder` has no limit. The default for another module is
            the number that it or its configuration states as ``block_size``, ``context_length``, ``max_seq_len``,
            ``max_position_embeddings``, ``n_positions`` or ``n_ctx``, if there is one.

    Raises:
        RangeError: there are more tokens than a table of learned positions has rows, or more than the model can read.
        ShapeError: the ids are not integers, or the model returned no logits.

    >>> from locant.positions import PositionEncoding
    >>> model = Decoder(256, PositionEncoding(), d_model=32, num_layers=2, num_heads=4)
    >>> generate(model, [72, 105], 5).shape
    torch.Size([7])
    >>> tutorial = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    >>> generate(tutorial, [72, 105], 5).shape
    torch.Size([7])
    """
    num_tokens = whole("num_tokens", num_tokens, 1, remedy=Remedy(num_tokens=100))
    temperature = real("temperature", temperature, low=0, remedy=Remedy(temperature=1.0))
    if not callable(model):
        got = f"got {short_repr(model)} for model, expected a module or a function from ids to logits"
        raise RangeError(got, "pass locant.lab.load(folder)[0]")
    if max_seq_len is not None:
        max_seq_len = whole("max_seq_len", max_seq_len, 1, remedy=Remedy(max_seq_len=1024))
    if isinstance(model, Decoder):
        _require_top_k(top_k, model.embedding.token.vocab_size)
    elif top_k is not None:
        top_k = whole("top_k", top_k, 1, remedy=Remedy(top_k=50))
    if isinstance(ids, (str, bytes)):
        raise ShapeError(f"got {short_repr(ids)} for ids, expected integers", "tokenizer.encode('a prompt')")
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    prompt = torch.as_tensor(ids, device=None if parameter is None else parameter.device)
    if prompt.numel() and (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool):
        got = f"got ids of dtype {dtype_name(prompt.dtype)}, expected integers"
        raise ShapeError(got, "tokenizer.encode('a prompt')")
    prompt = prompt.long()
    if prompt.ndim not in (1, 2) or not prompt.shape[-1]:
        raise shape_error("ids", prompt, "(seq,) or (batch, seq) with a token or more", "tokenizer.encode('a prompt')")
    rows = prompt.view(-1, prompt.shape[-1])
    draw = _Draw(temperature, top_k, torch.Generator(rows.device).manual_seed(seed))
    with _in_eval_mode(model):
        if isinstance(model, Decoder) and max_seq_len is None:
            text = _from_decoder(model, rows, num_tokens, draw)
        else:
            text = _from_module(model, rows, num_tokens, draw, max_seq_len or _stated_length(model))
    return text.view(*prompt.shape[:-1], -1)


class _Draw:
    """A function that draws the next token of each row. The same seed draws the same tokens."""

    def __init__(self, temperature: Real, top_k: int | None, generator: torch.Generator) -> None:
        self.temperature, self.top_k, self.generator = temperature, top_k, generator
        self._seed = generator.initial_seed()

    def begin(self) -> None:
        """Set the seed again, as for the first token."""
        self.generator.manual_seed(self._seed)

    def __call__(self, logits: Float[Tensor, "batch vocab_size"]) -> Int[Tensor, "batch one"]:
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        if self.top_k is not None:
            lowest_kept = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
        return torch.multinomial((logits / self.temperature).softmax(-1), 1, generator=self.generator)


def _from_decoder(model: Decoder, rows: Tensor, num_tokens: int, draw: _Draw) -> Tensor:
    total, longest = rows.shape[1] + num_tokens, getattr(model.encoding, "max_seq_len", None)
    if longest is not None and total > longest:
        room, other = longest - rows.shape[1], "or use an encoding without a table, such as rotary"
        cause = f"got {rows.shape[1]} + {num_tokens} tokens, but the model has learned positions for {longest}"
        raise RangeError(
            cause, Remedy(f"{{}}, {other}", num_tokens=room) if room > 0 else f"use a shorter prompt, {other}"
        )

    def continuation(with_cache: bool) -> Tensor:
        draw.begin()
        whole_text, new = rows, rows
        caches = [KVCache(max_len=total, encoding=model.encoding) for _ in model.blocks] if with_cache else None
        for _ in range(num_tokens):
            scores = model(whole_text if caches is None else new, caches=caches)
            new = draw(scores[:, -1])
            whole_text = torch.cat([whole_text, new], dim=1)
        return whole_text

    return call_with_cache_if_supported(continuation)


def call_with_cache_if_supported(read: Callable[[bool], T]) -> T:
    """Call a function with a cache or, if it raises a `LocantError`, without a cache. Return its result.

    For example, a convolution needs whole texts, because it reads the neighbours of a token, which no cache contains.
    """
    try:
        return read(True)
    except LocantError:
        return read(False)


def _from_module(model: Any, rows: Tensor, num_tokens: int, draw: _Draw, longest: int | None) -> Tensor:
    text = rows
    for _ in range(num_tokens):
        read = text if longest is None else text[:, -longest:]
        try:
            returned = model(read)
        except (AssertionError, IndexError, RuntimeError) as error:
            if read.shape[1] == rows.shape[1]:  # the model fails on the prompt, and its error gives the reason
                raise
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            got = f"got {read.shape[1]} tokens, one more than the model has read before, which it cannot read: {why}"
            raise RangeError(got, Remedy(max_seq_len=read.shape[1] - 1)) from error
        logits = _logits(returned, read)
        _require_top_k(draw.top_k, logits.shape[-1])
        text = torch.cat([text, draw(logits)], dim=1)
    return text


def _logits(returned: Any, ids: Tensor) -> Float[Tensor, "batch vocab_size"]:
    """Return the logits of the last token from the return value of a model."""
    logits = returned
    if isinstance(returned, Mapping):
        logits = returned.get("logits")
    elif hasattr(returned, "logits"):
        logits = returned.logits
    elif isinstance(returned, (tuple, list)):
        logits = returned[0] if returned else None
    batch, seq_len = ids.shape
    expected = f"logits of shape ({batch}, {seq_len}, vocab_size) for ids of shape {tuple(ids.shape)}"
    remedy = "return logits, or (logits, loss), from the model's forward"
    if not isinstance(logits, Tensor):
        raise ShapeError(f"got {_describe(returned)} from the model, expected {expected}", remedy)
    if logits.ndim != 3 or logits.shape[0] != batch or logits.shape[1] not in (1, seq_len) or not logits.shape[2]:
        raise ShapeError(f"got {_describe(returned)} from the model, expected {expected}", remedy)
    if not logits.is_floating_point():
        raise ShapeError(
            f"got {_describe(returned)} of {dtype_name(logits.dtype)} from the model, expected {expected}", remedy
        )
    last = logits[:, -1].to(ids.device)
    if not (last.max(dim=-1).values.isfinite()).all() or last.isnan().any():  # -inf hides a token
        wrong = "NaN" if last.isnan().any() else f"{float(last.max())} as the largest"
        raise RangeError(f"got {wrong} of the logits from the model, expected numbers", "train it with a smaller rate")
    return last.float()


def _describe(returned: Any) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} of {', '.join(map(str, returned)) or 'nothing'}"
    if isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__} of ({', '.join(map(_describe, returned))})"
    return f"a {type(returned).__name__}"


def _stated_length(model: Any) -> int | None:
    """Return the largest number of tokens that a model can read, or ``None`` if it does not state this number."""
    for holder in (model, *(getattr(model, name, None) for name in ("config", "cfg"))):
        for name in LENGTHS:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


@contextmanager
def _in_eval_mode(model: Any) -> Generator[None]:
    """Switch dropout off until the block ends, and then restore the mode of each part."""
    modes = [(part, part.training) for part in model.modules()] if isinstance(model, nn.Module) else []
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _require_top_k(top_k: int | None, vocab_size: int) -> None:
    if top_k is not None:
        whole("top_k", top_k, 1, vocab_size, remedy=Remedy(top_k=min(50, vocab_size)))
