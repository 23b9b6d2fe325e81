"""Learned tables of positions: one row for each position of a text, added to the token embeddings.

Three facts decide the row of a position: whether rows come before position 0, how many, and whether the length in the
configuration counts them. RoBERTa and similar models have position 0 after the row of the padding token, and their
length counts these rows: 514 rows for 512 positions. BART and similar models have two rows before position 0, which
their length does not count: 1,026 rows for 1,024 positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from locant.arguments import short_repr
from locant.errors import InputError
from locant.models.architecture import Architecture, warn_if
from locant.models.config_values import LENGTHS, WIDTHS, Config, flag_at, integer, required, required_value
from locant.models.weights import InputTables
from locant.positions.base import PositionEncoding
from locant.positions.encodings.learned import Learned, LearnedGrid

NOT_COMPARED = InputTables(why_not="the input embedding of its code was not compared with InputEmbedding")
EncodingFactory = Callable[[Config, str | None], PositionEncoding]
LENGTH = LENGTHS[0]
PADDING = "pad_token_id"


def size(config: Config, key: str, synonyms: tuple[str, ...]) -> int:
    """Return the size under the key that the class reads, or else under one of the usual keys."""
    return required(config, key) if config.get(key) is not None else required(config, key, *synonyms)


def encoding_row(encoding: EncodingFactory, defaults: Config, /, **row: Any) -> Architecture:
    """Return an `Architecture` with this encoding and these defaults.

    `row` can override the fields and add ``defaults``.
    """
    fields: dict[str, Any] = {"encoding": encoding, "inputs": NOT_COMPARED, **row}
    fields["defaults"] = {**defaults, **row.get("defaults", {})}
    return Architecture(**fields)


def learned(
    max_seq_len: int = 512, *, length: str = LENGTH, width: str = WIDTHS[0], offset: int = 0, **row: Any
) -> Architecture:
    """Return an `Architecture` with a table whose configured length does not count the `offset` rows before position 0.

    `length` and `width` are keys of the configuration, and `max_seq_len` is the default length of its class.
    """

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        return Learned(size(config, length, LENGTHS), size(config, width, WIDTHS), offset=offset)

    return encoding_row(encoding, {length: max_seq_len}, **row)


def learned_after_padding(
    max_seq_len: int = 512, padding: int | None = 1, *, fixed: bool = False, width: str = WIDTHS[0], **row: Any
) -> Architecture:
    """Return an `Architecture` with a table whose configured length counts all rows.

    Position 0 comes after the row of the padding token. `max_seq_len` and `padding` are the defaults of the class. If
    the padding token is `fixed`, no key changes it.
    """

    def encoding(config: Config, layer_type: str | None) -> PositionEncoding:
        return after_padding(config, size(config, width, WIDTHS), padding if fixed else None)

    token = {} if fixed or padding is None else {PADDING: padding}
    return encoding_row(encoding, {LENGTH: max_seq_len, **token}, **row)


def after_padding(config: Config, width: int, padding: int | None = None) -> Learned:
    """Return the table of a configuration in which position 0 comes after the row of the padding token."""
    token = required_value(config, PADDING, f"{PADDING!r}: 1, usually") if padding is None else padding
    offset = integer(PADDING, token, 0) + 1
    rows = size(config, LENGTH, LENGTHS)
    if rows <= offset:
        raise InputError(f"got {LENGTH}={rows}, of which {offset} rows are not positions", f"{LENGTH!r}: 514, usually")
    return Learned(rows - offset, width, offset=offset)


def _encoder_or_decoder(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return the longer table of the encoder, or the table of the decoder (LED)."""
    return Learned(required(config, f"max_{layer_type}_position_embeddings"), size(config, "d_model", WIDTHS))


def _reformer(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return the joined table of two tables.

    Row p joins row p // W of the first and row p % W of the second (W rows).
    """
    if not flag_at(config, "axial_pos_embds", default=True):
        return Learned(size(config, LENGTH, LENGTHS), size(config, WIDTHS[0], WIDTHS))
    sides = config.get("axial_pos_shape")
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        raise InputError(f"got axial_pos_shape={short_repr(sides)}, expected two numbers of rows", "[64, 64]")
    return Learned(math.prod(integer("axial_pos_shape", side) for side in sides), required(config, WIDTHS[0]))


def _resized_table(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table that is resized to the length of a text, as a table of patches is resized for an image."""
    return LearnedGrid(1, size(config, LENGTH, LENGTHS), size(config, WIDTHS[0], WIDTHS), mode="bilinear")


def _queries(config: Config, layer_type: str | None) -> PositionEncoding:
    """Return a table for text. Learned queries have no positions."""
    if not flag_at(config, "use_qformer_text_input"):
        return PositionEncoding()
    return Learned(size(config, LENGTH, LENGTHS), size(config, WIDTHS[0], WIDTHS))


TWO_TABLES = "encoder and decoder have one table each"
AXIAL = warn_if(
    lambda config, encoding: flag_at(config, "axial_pos_embds", default=True),
    "its table is made of two: row p is row p // W of the first, joined with row p % W of the second, with "
    "axial_pos_shape={config[axial_pos_shape]} and W the last of these",
)
STRETCHED = (
    "the table is resized to the length of a shorter text: embed with Positions.grid(1, length), or pad the text"
)
BOXES = "its code also adds the place of a word on the page, from tables for x, y, height and width of its box"
CHARACTERS = "the input is characters, with one position each; the middle layers add no positions"
BY_TIME = "a position is the time of a step, and return, state and action of one step share it"
TYPES_OF_TOKENS = "its code also adds row, column and rank of a cell, from one table each"
DISTANCES_OF_BOXES = "scores also have a term of sines of the distance between the boxes of two words"
TASKS = "its code may also add a row for the task, from another table"
IMAGE_TABLE = "the tokens of an image have a second table, visual_position_embeddings"
PRONUNCIATION = "its code also adds pronunciation and shape of a character"
BY_HIDDEN_STATES = (
    "its decoder also adds a number for each head and bucket of distances, which it computes from hidden states and "
    "not from queries or keys"
)
ENTITIES = "entities have another table, and get the mean of the rows of their words"

PLAIN = learned()
CLIP_LIKE = learned(77)
OWL_LIKE = learned(16)
SIGLIP_LIKE = learned(64)
BART_LIKE = learned(1024, width="d_model", offset=2, warnings=(TWO_TABLES,))
ROBERTA_LIKE = learned_after_padding()
ROBERTA_514 = learned_after_padding(514)
LAYOUT = (BOXES,)

BART_LARGE = {
    "vocab_size": 50265, "d_model": 1024, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
    "encoder_layers": 12, "decoder_layers": 12, "max_position_embeddings": 1024,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "bart": replace(BART_LIKE, presets={"bart-large": BART_LARGE}),
    **dict.fromkeys(("mbart", "mvp", "plbart"), BART_LIKE),
    "pp_formulanet_text": learned(2560, width="d_model", offset=2),
    "biogpt": learned(1024, offset=2),
    "blenderbot": learned(128, width="d_model", warnings=(TWO_TABLES,)),
    "blenderbot-small": learned(512, width="d_model", warnings=(TWO_TABLES,)),
    "bigbird_pegasus": learned(4096, width="d_model", warnings=(TWO_TABLES,)),
    "led": Architecture(
        encoding=_encoder_or_decoder, layer_types=lambda config: ("encoder", "decoder"), default_layer_type="encoder",
        defaults={"max_encoder_position_embeddings": 16384, "max_decoder_position_embeddings": 1024},
        inputs=NOT_COMPARED,
    ),
    "prophetnet": learned_after_padding(512, 0, warnings=(TWO_TABLES, BY_HIDDEN_STATES)),
    **dict.fromkeys(
        (
            "align_text_model", "bert-generation", "blip_text_model", "chinese_clip_text_model", "dpr",
            "flava_text_model", "fnet", "instructblip_qformer", "instructblipvideo_qformer", "lxmert", "megatron-bert",
            "mobilebert", "splinter",
        ),
        PLAIN,
    ),
    "blip_2_qformer": learned(encoding=_queries, defaults={"use_qformer_text_input": False}),
    **dict.fromkeys(("convbert", "squeezebert"), learned(width="embedding_size")),
    "rembert": learned(width="input_embedding_size"),
    "ernie": learned(warnings=(TASKS,)),
    "roc_bert": learned(warnings=(PRONUNCIATION,)),
    "visual_bert": learned(warnings=(IMAGE_TABLE,)),
    "tapas": learned(1024, warnings=(TYPES_OF_TOKENS,)),
    "big_bird": learned(4096),
    "git": learned(1024),
    "canine": learned(16384, length="num_hash_buckets", defaults={LENGTH: 16384}, warnings=(CHARACTERS,)),
    **dict.fromkeys(
        (
            "aimv2_text_model", "clip_text_model", "clipseg_text_model", "groupvit_text_model", "metaclip_2_text_model",
            "xclip_text_model",
        ),
        CLIP_LIKE,
    ),
    "sam3_lite_text_text_model": learned(77, encoding=_resized_table, warnings=(STRETCHED,)),
    **dict.fromkeys(("owlv2_text_model", "owlvit_text_model"), OWL_LIKE),
    **dict.fromkeys(("siglip2_text_model", "siglip_text_model"), SIGLIP_LIKE),
    "mra": learned(offset=2),
    "nystromformer": learned(510, offset=2),
    "yoso": learned(4096, offset=2),
    **dict.fromkeys(
        ("data2vec-text", "ibert", "longformer", "roberta-prelayernorm", "xmod"), ROBERTA_LIKE
    ),
    **dict.fromkeys(
        ("altclip_text_model", "bridgetower_text_model", "clap_text_model", "xlm-roberta-xl"), ROBERTA_514
    ),
    "luke": learned_after_padding(warnings=(ENTITIES,)),
    "lilt": learned_after_padding(512, 0, warnings=LAYOUT),
    "markuplm": learned_after_padding(512, 0, warnings=("its code also adds the path of a word in the page's tree",)),
    "layoutlm": learned(warnings=LAYOUT),
    "bros": learned(warnings=(DISTANCES_OF_BOXES,)),
    "openai-gpt": learned(512, length="n_positions", width="n_embd"),
    "imagegpt": learned(1024, length="n_positions", width="n_embd"),
    "decision_transformer": learned(4096, length="max_ep_len", defaults={"n_positions": 1024}, warnings=(BY_TIME,)),
    "clvp_decoder": learned(608),
    "cohere_asr": learned(1024),
    **dict.fromkeys(("semantic", "coarse_acoustics", "fine_acoustics"), learned(1024, length="block_size")),
    "reformer": Architecture(
        encoding=_reformer, inputs=NOT_COMPARED, warnings=(AXIAL,),
        defaults={LENGTH: 4096, "axial_pos_shape": (64, 64), "axial_pos_embds": True},
    ),
    "perceiver": learned(2048, width="d_model"),
    "vilt": learned(40),
}  # fmt: skip
