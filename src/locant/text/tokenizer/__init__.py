"""Tokenizers: text to token ids and back."""

from locant.text.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
