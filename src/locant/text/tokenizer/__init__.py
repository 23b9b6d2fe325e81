"""Tokenizers: text to token ids and back."""

from locant.text.tokenizer.tokenizer import Tokenizer as Tokenizer

__all__ = ["Tokenizer"]
