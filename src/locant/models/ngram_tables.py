"""The n-gram tables of published models, read from their configurations.

Qwen4 and Engram (DeepSeek-V4.1) have a table in some layers. BLT adds the rows of hashed bytes to its byte embedding,
and LongCat averages projected rows with its token embedding. The numbers are those of the modeling code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from locant import arguments
from locant.arguments import short_repr
from locant.embedding.ngram_hash import LAYER_STEP, MAX_INT64, NGramHash, primes_from, random_multipliers, wrap
from locant.embedding.table import TableSize
from locant.errors import InputError
from locant.models.config_values import WIDTHS, Config, config_dict, integer, number, required

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
BLT_PRIMES = (
    1000000007, 5915587277, 1500450271, 3267000013, 5754853343, 4093082899, 9576890767, 3628273133, 2860486313,
    5463458053, 3367900313,
)  # fmt: skip
"""The base of the polynomial of each hash function. Further functions begin again with the first."""


@dataclass(frozen=True, kw_only=True)
class NGramTable:
    """One n-gram table of a model.

    Args:
        layer: the index of its layer, or ``None`` at the input.
        num_rows: the number of rows, padding included.
        module: the name of the module with the weight, or of several whose rows follow each other.
        init_std: the standard deviation of new rows, if the model has its own.
        pad_id: the token before the first one, if ids are mapped to other numbers before they are hashed.
    """

    hashing: NGramHash
    width: int
    combine: Literal["concat", "sum"]
    layer: int | None
    num_rows: int
    module: str
    init_std: float | None = None
    pad_id: int | None = None

    @property
    def size(self) -> TableSize:
        name = "n-grams" if self.layer is None else f"n-grams of layer {self.layer}"
        return TableSize(name=name, shape=(self.num_rows, self.width))

    def hash_for(self, token_map: Tensor | np.ndarray | None) -> NGramHash:
        """Return the hash of ids, or of the numbers to which `token_map` maps them."""
        if token_map is None or self.pad_id is None:
            return self.hashing
        if self.pad_id >= len(token_map):
            got = f"got a token_map of {len(token_map)} ids, without the padding id {self.pad_id}"
            raise InputError(got, "use the tokenizer of the model")
        return replace(self.hashing, fill=int(token_map[self.pad_id]))


def ngram_tables(config: Config | object) -> tuple[NGramTable, ...]:
    """Return the n-gram tables of a model from the first layer to the last. Most models have none.

    >>> qwen = {"model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2048, "ple_layer_ids": [2],
    ...         "eos_token_id": 248044}
    >>> ngram_tables(qwen)[0].size
    TableSize(name='n-grams of layer 1', shape=(320001536, 128))
    """
    whole = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    if whole.get("model_type") == "blt":  # its text part is only its decoder
        return tuple(_blt(whole))
    values = config_dict(config)
    readers: dict[str, Callable[[Config], Iterator[NGramTable]]] = {
        "ple_layer_ids": _qwen4, "engram_layer_ids": _engram, "ngram_vocab_size_ratio": _longcat,
        "oe_vocab_size_ratio": _longcat,
    }  # fmt: skip
    for key, read in readers.items():
        if values.get(key):
            return tuple(read(values))
    return ()


def gate_options(config: Config | object, index: int) -> dict[str, Any]:
    """Return the options of the `NGramGate` of the `index`-th layer with an n-gram table."""
    tables, values = ngram_tables(config), config_dict(config)
    table = table_at(tables, index)
    if table.layer is None:
        got = "got a model whose n-gram table is at its input, without a gate"
        raise InputError(got, "use NGramEmbedding.from_config")
    is_engram = "engram_layer_ids" in values
    return {
        "rows_width": table.width * table.hashing.num_columns,
        "d_model": required(values, *WIDTHS),
        "num_streams": _optional(values, "hc_mult" if is_engram else "hc_count", 4),
        "kernel_size": 0 if is_engram else _optional(values, "ple_conv_kernel_size", 4),
        "dilation": table.hashing.max_order,
        "eps": number("rms_norm_eps", values.get("rms_norm_eps", 1e-20 if is_engram else 1e-6), low=0),
    }


def table_at(tables: Sequence[NGramTable], index: int) -> NGramTable:
    """Return the `index`-th table of a model. Raise `InputError` if the model has no n-gram table."""
    if not tables:
        got = "got a configuration of a model without n-gram tables"
        raise InputError(got, "pass the whole configuration, such as that of Qwen4, BLT or DeepSeek-V4.1")
    return tables[arguments.whole("index", index, 0, len(tables) - 1, remedy=f"index=0, of {len(tables)} tables")]


def _layers(config: Config, key: str) -> list[int]:
    layers = config[key]
    if not isinstance(layers, (list, tuple)):
        raise InputError(f"got {key}={short_repr(layers)}, expected a list of layers", f"{key!r}: [1, 14]")
    return [integer(key, layer, 0) for layer in layers]


def _optional(config: Config, key: str, default: int, low: int = 1) -> int:
    return integer(key, config.get(key, default), low)


def _end(config: Config) -> int | None:
    """Return the token that ends a text. Of several, the modeling code uses the first."""
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    return None if end is None else integer("eos_token_id", end, 0)


def _qwen4(config: Config) -> Iterator[NGramTable]:
    """Yield the tables of Qwen4. Each layer continues the sequence of primes at which the layer before it ends."""
    vocab_size, max_order = required(config, "vocab_size"), _optional(config, "ngram_size", 3, 2)
    heads, base = _optional(config, "heads_per_ngram", 8), _optional(config, "ngram_vocab_size_base", 20_000_000)
    divisor, seed = _optional(config, "make_ngram_vocab_size_divisible_by", 128), _optional(config, "seed", 1234, 0)
    layers, columns = sorted({*_layers(config, "ple_layer_ids")}), (max_order - 1) * heads
    width = (
        integer("ple_embed_dim", config["ple_embed_dim"]) if "ple_embed_dim" in config else required(config, *WIDTHS)
    )
    if width % columns:
        got = f"got ple_embed_dim={width} for {columns} columns, expected a multiple"
        raise InputError(got, "use the sizes of the model")
    end, primes = _end(config), primes_from(base)
    if end is None:
        got = "got a configuration with ple_layer_ids but without eos_token_id, at which its n-grams end"
        raise InputError(got, "add 'eos_token_id', as the model has it")
    orders = tuple(order for order in range(2, max_order + 1) for _ in range(heads))
    for place, layer in enumerate(layers):
        multipliers = _splitmix_multipliers(max_order, vocab_size, seed + LAYER_STEP * place)
        hashing = NGramHash(
            orders=orders, sizes=tuple(itertools.islice(primes, columns)),
            multipliers=tuple(multipliers[:order] for order in orders), vocab_size=vocab_size, fill=end, end=end,
        )  # fmt: skip
        yield NGramTable(
            hashing=hashing, width=width // columns, combine="concat", layer=layer - 1,
            num_rows=-(-hashing.num_rows // divisor) * divisor,
            module=f"layers.{layer - 1}.ple.ple_embedding.ngram_embedding",
            init_std=number("initializer_range", config.get("initializer_range", 0.02), low=0),
        )  # fmt: skip


def _splitmix_multipliers(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    bound = max(1, MAX_INT64 // vocab_size // 2)
    return tuple(2 * (_splitmix((seed + GAMMA * (place + 1)) & MASK) % bound) + 1 for place in range(count))


def _splitmix(value: int) -> int:
    """Return the hash of a number of 64 bits, as the generator SplitMix64 has it (Steele, Lea and Flood 2014)."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _engram(config: Config) -> Iterator[NGramTable]:
    """Yield the tables of Engram: the columns of each order have the next primes that no earlier column has."""
    layers, max_order = _layers(config, "engram_layer_ids"), _optional(config, "engram_max_ngram_size", 4, 2)
    heads, width = _optional(config, "engram_n_heads", 8), _optional(config, "engram_head_dim", 256)
    size, seed = required(config, "engram_vocab_size"), _optional(config, "engram_seed", 0, 0)
    ids = required(config, "vocab_size")
    numbers, pad = (
        _optional(config, "engram_compressed_vocab_size", ids),
        _optional(config, "engram_pad_token_id", 2, 0),
    )
    stated = config.get("engram_num_embeddings") or [0] * len(layers)
    orders = tuple(order for order in range(2, max_order + 1) for _ in range(heads))
    used = set[int]()
    for place, layer in enumerate(layers):
        sizes = list[int]()
        for _ in range(2, max_order + 1):
            sizes += itertools.islice((prime for prime in primes_from(size) if prime not in used), heads)
            used.update(sizes)
        multipliers = random_multipliers(max_order, numbers, seed + LAYER_STEP * layer)
        hashing = NGramHash(
            orders=orders, sizes=tuple(sizes), multipliers=tuple(multipliers[:order] for order in orders),
            vocab_size=numbers, fill=pad if numbers == ids else 0,
        )  # fmt: skip
        num_rows = integer("engram_num_embeddings", stated[place], 0) or hashing.num_rows
        if num_rows < hashing.num_rows:
            got = f"got engram_num_embeddings={num_rows} for layer {layer}, expected {hashing.num_rows} or more"
            raise InputError(got, "use the sizes of the model")
        yield NGramTable(
            hashing=hashing, width=width, combine="concat", layer=layer, num_rows=num_rows,
            module=f"layers.{layer}.engram.embed", pad_id=None if numbers == ids else pad,
        )  # fmt: skip


def _blt(config: Config) -> Iterator[NGramTable]:
    """Yield the one table of BLT: a polynomial of the bytes for each function and group size, oldest byte first."""
    groups = config.get("encoder_hash_byte_group_size") or [3, 4, 5, 6, 7, 8]
    if not isinstance(groups, (list, tuple)):
        got = f"got encoder_hash_byte_group_size={short_repr(groups)}, expected a list of sizes"
        raise InputError(got, "'encoder_hash_byte_group_size': [3, 4, 5, 6, 7, 8]")
    size = _optional(config, "encoder_hash_byte_group_vocab", 500_002)
    functions = _optional(config, "encoder_hash_byte_group_nb_functions", 1)
    encoder = config.get("encoder_config")
    if not isinstance(encoder, Mapping):
        got = "got a blt configuration without encoder_config, which has the width of its n-gram table"
        raise InputError(got, "pass the whole config.json")
    orders = [integer("encoder_hash_byte_group_size", each) for each in groups]
    columns = [(BLT_PRIMES[each % len(BLT_PRIMES)], order) for each in range(functions) for order in orders]
    yield NGramTable(
        hashing=NGramHash(
            orders=tuple(order for _, order in columns), sizes=(size,) * len(columns), operation="sum",
            multipliers=tuple(
                tuple(wrap(pow(prime, order - 1 - back, 2**64)) for back in range(order)) for prime, order in columns
            ),
            vocab_size=_optional(encoder, "vocab_size", 260),
        ),
        width=required(encoder, "hidden_size"), combine="sum", layer=None, num_rows=size * len(columns),
        module="encoder_hash_tok_embedding",
        init_std=number("initializer_range", config.get("initializer_range", 0.02), low=0),
    )  # fmt: skip


def _longcat(config: Config) -> Iterator[NGramTable]:
    """Yield the one table of LongCat: the number with the last n ids as its digits, in the base of the vocabulary."""
    prefix = "oe" if config.get("oe_vocab_size_ratio") and not config.get("ngram_vocab_size_ratio") else "emb"
    ratio_key = "oe_vocab_size_ratio" if prefix == "oe" else "ngram_vocab_size_ratio"
    ratio, vocab_size = number(ratio_key, config[ratio_key], above=0), required(config, "vocab_size")
    max_order, heads = required(config, f"{prefix}_neighbor_num", low=2), required(config, f"{prefix}_split_num")
    orders = tuple(order for order in range(2, max_order + 1) for _ in range(heads))
    sizes = tuple(int(ratio * vocab_size + 2 * column + 1) for column in range(len(orders)))
    width = required(config, *WIDTHS) // len(orders)
    yield NGramTable(
        hashing=NGramHash(
            orders=orders, sizes=sizes, operation="sum", vocab_size=vocab_size, end=_end(config),
            multipliers=tuple(
                tuple(pow(vocab_size, back, size) for back in range(order))
                for order, size in zip(orders, sizes, strict=True)
            ),
        ),
        width=width, combine="concat", layer=None, num_rows=sum(sizes), module="ngram_embeddings.embedders",
    )  # fmt: skip
