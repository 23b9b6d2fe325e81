"""Text: from files to token ids, and from token ids to windows of them."""

from locant.text.reading import read_texts as read_texts
from locant.text.reading import sample_text as sample_text
from locant.text.tokenizer import Tokenizer as Tokenizer
from locant.text.windows import IGNORED_TARGET as IGNORED_TARGET
from locant.text.windows import Batch as Batch
from locant.text.windows import Windows as Windows

__all__ = ["IGNORED_TARGET", "Batch", "Tokenizer", "Windows", "read_texts", "sample_text"]
