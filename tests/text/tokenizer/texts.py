"""Texts to draw: with halves of characters in them, and of the words and marks that tokenizers care about."""

from __future__ import annotations

import re

from hypothesis import strategies as st

__all__ = ["any_text", "plain_text", "well_formed"]

surrogates = st.sampled_from("\ud800\ud83d\udbff\udc00\ude42\udfff")
# A union of characters would be drawn from as one set, in which the surrogates are few.
any_text = st.lists(st.text(max_size=10) | surrogates, max_size=8).map("".join)
plain_text = st.text(st.sampled_from("the catsing \n\tÉé日本🙂<>|[]/ENDx0.▁Ġ"), max_size=60)


def well_formed(text: str) -> str:
    """The rule, written another way: pairs of surrogates are characters, single ones are U+FFFD."""
    pair = re.compile("([\ud800-\udbff])([\udc00-\udfff])")
    joined = pair.sub(lambda m: chr(0x10000 + (ord(m[1]) - 0xD800) * 0x400 + ord(m[2]) - 0xDC00), text)
    return re.sub("[\ud800-\udfff]", "\ufffd", joined)
