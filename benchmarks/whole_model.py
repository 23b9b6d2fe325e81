"""What does a whole small model cost with locant, beside plain torch, `transformers` and x-transformers?

A Llama of one size, four times: a training step, a prompt, and one more token behind a cache. Plain torch has the
cosines and sines of all positions in a table, and torch's fused attention. The first three have the same weights, and
it refuses to report if their logits differ.
``PYTHONPATH=src python -m benchmarks whole_model``
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Row, measure
from locant import KVCache, Positions, Rotary, attend
from locant.swapping.forward_arguments import cache_argument

__all__ = ["rows"]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EPS, BASE = 1e-6, 10_000.0
NEAR = 1e-3
"""The largest difference of logits, which are about 1 in size."""


@dataclass(frozen=True)
class Size:
    """The size of the model, of a training batch, and of a prompt."""

    vocab: int = 4_096
    width: int = 256
    layers: int = 4
    heads: int = 8
    mlp: int = 688
    batch: int = 2
    length: int = 512
    prompt: int = 1_024
    rounds: int = 15

    def __str__(self) -> str:
        return f"a Llama of {self.layers} layers, width {self.width} and {self.heads} heads"

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


Cache = list[Any]
"""One entry for each layer."""


class Attention(nn.Module):
    """The projections. A subclass attends."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, where: Any, cache: Cache | None, layer: int) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v, where, cache, layer).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, where: Any, cache: Cache | None, layer: int) -> Tensor:
        raise NotImplementedError


class PlainAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, where: Any, cache: Cache | None, layer: int) -> Tensor:
        cos, sin = where
        q, k = q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin
        if cache is not None:
            past = cache[layer]
            k, v = (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
            cache[layer] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


class OurAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, where: Any, cache: Cache | None, layer: int) -> Tensor:
        rotary, positions = where
        if cache is None:
            q, k = rotary.rotate(q, k, positions)
            return attend(q, k, v, encoding=rotary, positions=positions)
        q, k, v, k_positions = cache[layer].rotate_and_append(rotary, q, k, v, positions)
        return attend(q, k, v, encoding=rotary, positions=positions, k_positions=k_positions)


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class Mlp(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size.width, size.mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.mlp, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, size: Size, attention: type[Attention]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(size.width, EPS) for _ in range(2))
        self.self_attn, self.mlp = attention(size), Mlp(size)

    def forward(self, x: Tensor, where: Any, cache: Cache | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), where, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """The Llama, whose parameters have the names that `transformers` uses."""

    def __init__(self, size: Size, attention: type[Attention]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, EPS)
        self.lm_head = nn.Linear(size.width, size.vocab, bias=False)
        self.rotary = Rotary(size.head_dim, base=BASE)
        if attention is PlainAttention:
            cos, sin = self.rotary.cos_sin(size.prompt + size.length)
            self.register_buffer("cos", torch.cat([cos, cos], -1)[0], persistent=False)
            self.register_buffer("sin", torch.cat([sin, sin], -1)[0], persistent=False)

    def forward(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        stop = start + ids.shape[1]
        if hasattr(self, "cos"):
            cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
            where: Any = (cos[start:stop], sin[start:stop])
        else:
            where = self.rotary, Positions.after(start, ids.shape[1], device=ids.device)
        x = self.embed_tokens(ids)
        for number, block in enumerate(self.layers):
            x = block(x, where, cache, number)
        return self.lm_head(self.norm(x))


Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """A model, its logits for a batch, and a function that reads a prompt and returns a step of decoding.

    The step returns the logits of one token, and leaves the cache as it was.
    """

    model: nn.Module
    logits: Logits
    decoder: Callable[[Tensor], Logits]


def rows(size: Size | None = None) -> list[Row]:
    """Training, prompt and decoding, each with all contenders in turns."""
    size = Size() if size is None else size
    contenders = _contenders(size)
    return [*_training(size, contenders), *_prompt(size, contenders), *_decoding(size, contenders)]


def _contenders(size: Size) -> dict[str, Contender]:
    plain, ours = Model(size, PlainAttention), Model(size, OurAttention)
    nn.init.normal_(plain.embed_tokens.weight)
    ours.load_state_dict(plain.state_dict())
    found = {"plain torch": _plain(plain.to(DEVICE)), "locant": _ours(ours.to(DEVICE))}
    if importlib.util.find_spec("transformers"):
        found["transformers"] = _transformers(size, plain.state_dict())
    if importlib.util.find_spec("x_transformers"):
        found["x-transformers"] = _x_transformers(size)
    missing = {"transformers", "x-transformers"} - found.keys()
    print("".join(f"not installed, and so not measured: {name}\n" for name in sorted(missing)), end="")
    _require_equal(size, found)
    return found


def _require_equal(size: Size, contenders: dict[str, Contender]) -> None:
    """Raise if models with the same weights differ, or if the model with its own weights has another size."""
    ids = _draw(size, 1, min(size.prompt, 32))
    expected, number = {}, sum(x.numel() for x in contenders["plain torch"].model.parameters())
    for name, each in contenders.items():
        parameters = sum(x.numel() for x in each.model.parameters())
        assert abs(parameters - number) <= 0.02 * number, f"{name} has {parameters} parameters, expected {number}"
        each.model.eval()
        with torch.no_grad():
            logits = each.logits(ids)
            step = each.decoder(ids[:, :-1])
            found = [logits[:, -1], step(ids[:, -1:])[:, -1], step(ids[:, -1:])[:, -1]]
        goal = expected.setdefault(name if name == "x-transformers" else "one", logits[:, -1])
        error = max(float((x - goal).abs().max()) for x in found)
        assert error < NEAR, f"the logits of {name} are off by {error}"


def _plain(model: Model) -> Contender:
    def decoder(prompt: Tensor) -> Logits:
        cache: Cache = [None] * len(model.layers)
        model(prompt, cache)
        return lambda ids: model(ids, [*cache], prompt.shape[1])

    return Contender(model, model, decoder)


def _ours(model: Model) -> Contender:
    def decoder(prompt: Tensor) -> Logits:
        caches, length = [KVCache() for _ in model.layers], prompt.shape[1]
        model(prompt, caches)

        def step(ids: Tensor) -> Tensor:
            logits = model(ids, caches, length)
            for cache in caches:
                cache.truncate(length)
            return logits

        return step

    return Contender(model, model, decoder)


def _transformers(size: Size, weights: dict[str, Tensor]) -> Contender:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.width, intermediate_size=size.mlp, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, rms_norm_eps=EPS, tie_word_embeddings=False,
        max_position_embeddings=size.prompt + size.length,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(DEVICE)
    model.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": x for name, x in weights.items()})

    def decoder(prompt: Tensor) -> Logits:
        cache = DynamicCache(config=config)
        arguments: dict[str, Any] = {str(cache_argument(model)): cache, "use_cache": True}
        model(prompt, **arguments)

        def step(ids: Tensor) -> Tensor:
            logits = model(ids, **arguments).logits
            cache.crop(-1)
            return logits

        return step

    return Contender(model, lambda ids: model(ids, use_cache=False).logits, decoder)


def _x_transformers(size: Size) -> Contender:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=size.width, depth=size.layers, heads=size.heads, attn_dim_head=size.head_dim, rotary_pos_emb=True,
        rotary_emb_dim=size.head_dim, use_rmsnorm=True, attn_flash=True, ff_glu=True, ff_swish=True, ff_no_bias=True,
        ff_mult=size.mlp / size.width,
    )  # fmt: skip
    length = size.prompt + size.length
    model = TransformerWrapper(num_tokens=size.vocab, max_seq_len=length, attn_layers=layers, use_abs_pos_emb=False)
    model = model.to(DEVICE)

    def decoder(prompt: Tensor) -> Logits:
        _, cache = model(prompt, return_intermediates=True)
        return lambda ids: model(ids, cache=cache, input_not_include_cache=True, return_intermediates=True)[0]

    return Contender(model, model, decoder)


def _draw(size: Size, batch: int, length: int) -> Tensor:
    return torch.randint(size.vocab, (batch, length), device=DEVICE)


def _training(size: Size, contenders: dict[str, Contender]) -> list[Row]:
    ids, targets = (_draw(size, size.batch, size.length) for _ in range(2))

    def step(contender: Contender) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(contender.model.train().parameters(), fused=True)

        def run() -> None:
            loss = F.cross_entropy(contender.logits(ids).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _wait()

        return run

    question = f"a training step of {size}, {size.batch} x {size.length} tokens, {DEVICE} (wanted: 1)"
    return measure(question, {name: step(each) for name, each in contenders.items()}, rounds=size.rounds)


@torch.no_grad()
def _prompt(size: Size, contenders: dict[str, Contender]) -> list[Row]:
    ids = _draw(size, 1, size.prompt)

    def read(contender: Contender) -> Callable[[], None]:
        contender.model.eval()

        def run() -> None:
            contender.logits(ids)
            _wait()

        return run

    question = f"a prompt of {size.prompt} tokens, {size}, {DEVICE} (wanted: 1)"
    return measure(question, {name: read(each) for name, each in contenders.items()}, rounds=size.rounds)


@torch.no_grad()
def _decoding(size: Size, contenders: dict[str, Contender]) -> list[Row]:
    prompt, token = _draw(size, 1, size.prompt), _draw(size, 1, 1)

    def decode(contender: Contender) -> Callable[[], None]:
        contender.model.eval()
        step = contender.decoder(prompt)

        def run() -> None:
            for _ in range(10):
                step(token)
            _wait()

        return run

    question = f"10 times one more token behind {size.prompt}, {size}, {DEVICE} (wanted: 1)"
    return measure(question, {name: decode(each) for name, each in contenders.items()}, rounds=size.rounds)


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()
