"""Texts on which two tokenizers that look the same may differ."""

from __future__ import annotations

_TEXTS = [
    *("", " ", "  ", "\n", "\n\n\n", "\r\n", "\t\t ", " \n \n", "a", " a", "a ", "a  b", "a\n\n b", "\x00"),
    "a\x00\x00b",
    *("it's they'RE I'Ll 'tis ''s ' s", "don\u2019t", "x'sx 'S's", "'\u017f 'K \u212a's"),  # long s, Kelvin
    *("1234567890 12 345", "3.14e-10", "\u00bd \u00b2 \u0663\u0664 \u2167 \u3007"),
    *("<|endoftext|>", "<s></s>[CLS]<unk>", "<|im_start|>user\n<think>\n\n</think>"),
    *("\ufb01 \ufb00 \u01c6 \u0130 \u0131 \u00df \u1e9e", "e\u0301 \u00e9 a\u0308\u0323", "\ufeffx\ufeff"),
    *("\u2028\u2029\x85\xa0\u3000x", "a\x0bb\x0cc\x1cd\x1ee\u180ef\u200bg\u202fh\u205fi", "\xad \u00a0 \u00a0a"),
    *("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd", "\u202eabc\u202c \u2066x\u2069"),
    *("\u0645\u0631\u062d\u0628\u0627", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e44\u0e17\u0e22 \u0e51"),
    "\u65e5\u672c\u8a9e\u3001\u30c6\u30b9\u30c8\u3002\n\u6b21",
    *("\ud55c\uad6d\uc5b4 \ud14d", "\U0001d518\U0001d52b \U00010348 \U00020000"),
    "\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea",
    *("\U000e0001\U0010ffff\ue000", "\u0378\u2fe0", "\u0300\u0300 \u0300a", "\u1b05\ua9cf \U0001e900\U00031350"),
    # Letters of Unicode 15 to 17.
    *("a\u088f's \u0c5cb'll x", "\U0003295c's \U000323b0\U00011f04 \U0001e4d0x", "a\ua7ceb\U00016ec0c\u1acfd"),
    *("a" * 3000, " " * 3000, "\n" * 300, "ab" * 1500, "=-" * 999, "\u00e9" * 2000, "\u65e5" * 999, "0" * 1000),
    *("?!" * 50 + "\n\n x", "\t\n" * 99 + "x", " ".join("ab" * i for i in range(40)), "x" * 63 + " " + "y" * 64 + " z"),
]

# Not UTF-8: a stray byte, an incomplete character, a surrogate, a character beyond Unicode, and an overlong one.
_BYTES = [
    *(b"\xff", b"\xc3", b"a\x80b\xfe\xff c", b"\xe6\x97", b"\xf0\x9f\x99 \xed\xa0\x80", b"\xf4\x90\x80\x80x\xc0\xaf")
]

PROBE_TEXTS: tuple[bytes, ...] = (*(text.encode() for text in _TEXTS), *_BYTES)
"""Texts on which two tokenizers that look the same may differ. An engine must agree on all of them."""
