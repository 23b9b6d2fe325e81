"""What is known to differ in releases of `transformers` that are older than the one of `constraints.txt`.

``make test-versions`` skips these tests with such a release, and says why. A test that is not here has to pass: what
can be looked up is looked up by the test itself, and what is a fault of locant is mended.
"""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

QWEN = "Qwen2-VL gives the frames of a video one position in time"
OLMO = "OLMo 3 has one rotary module for all layers, and its configuration another default base"
BY_TYPE = "the rope parameters of a layer type are completed otherwise: trained length, truncation and base"
BY_NAME = "its attention is not called by name, so there is no point for scores"
VISION = "the rotary module of images is built from a number, and that of text does not say its sections"
DYNAMIC = "after a row past the trained length, a dynamic scaling stretches short rows too"
LLAMA_4 = "the logits of a swapped Llama 4 differ in some bits, of which the cause is not known yet"
TABLES = "GPT-J and its kin look angles up in a table that is computed inside of attention"

DIFFERENT: dict[str, str] = {
    r"test_right_batches.*\[qwen2_vl, (videos|packed)": QWEN,
    r"test_batch_images.*test_the_rule_is_equal_to_transformers\[qwen2_vl-": QWEN,
    r"test_batch_images.*test_each_document_of_a_row_is_counted": QWEN,
    r"test_batch_images.*\[qwen2_vl-videos\]": QWEN,
    r"(test_every_rotary_module|test_registry|test_windows|test_rows|test_rotary_layers).*\[olmo3\]": OLMO,
    r"test_every_rotary_module.*\[(qwen(2|2_5|3)_vl(_moe)?|gemma4)\]": VISION,
    r"swapping/test_t5\.py": BY_NAME,
    r"test_places.*test_a_model_that_passes_nothing_on": BY_NAME,
    r"test_extension.*test_what_is_written_says_to_transformers.*\[config0-": OLMO,
    r"test_extension.*test_what_is_written_says_to_transformers.*\[config[12]-yarn": BY_TYPE,
    r"test_spellings.*(test_rope_parameters_of_a_layer_type|test_one_rope_scaling_for_layers)": BY_TYPE,
    r"test_batch_model.*test_the_list_of_models_that_mix_documents": "packed documents raise no error in states",
    r"test_foreign.*test_sizes_are_those_of_each_layer": "Gemma 4 states another width for its full layers",
    r"test_architectures.*test_warnings_of_transformers_and_classes": "there is no Step 3.7",
    r"test_rows.*test_a_share_is_read.*\[(gemma4_text|modernbert)\]": "single values beside those of types fail",
    r"test_foreign.*\[xpos-gpt_neox\]": "other positions change a tiny GPT-NeoX by less than the test asks for",
    r"test_rows.*\[gemma3_text\]": "the rope parameters of Gemma 3 have single values beside those of each layer type",
    r"test_spellings.*\[GPT-NeoX Japanese\]": "the rotary module of GPT-NeoX Japanese does not read rotary_pct",
    r"test_published_configurations.*\[GLM-5\.1": "GLM-5 rotates halves of a head, and interleaved pairs later",
    r"test_published_configurations.*\[codegen": TABLES,
    r"test_families.*(\[llama-dynamic\]|test_a_module_that_computes_otherwise)": DYNAMIC,
    r"test_architectures.*test_what_attention_reorders": "Qwen2.5-Omni turns interleaved pairs by tables of halves",
    r"(test_families|test_life).*\[llama4_text": LLAMA_4,
    r"(test_families|test_architectures).*\[(gptj|codegen)\]": TABLES,
}
"""Patterns of tests, and how the release differs."""


def how_it_differs(test: str, version: str) -> str | None:
    """Why a test is skipped with this version; ``None``: it is not."""
    if Version(version) >= newest_tested():
        return None
    return next((reason for pattern, reason in DIFFERENT.items() if re.search(pattern, test)), None)


def newest_tested() -> Version:
    """The version of `transformers` that all tests run with."""
    lines = (Path(__file__).resolve().parents[1] / "constraints.txt").read_text(encoding="utf-8")
    return Version(re.findall(r"^transformers==(.*)$", lines, re.MULTILINE)[0])
