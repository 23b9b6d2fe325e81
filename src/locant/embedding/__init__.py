"""Ids into vectors: token, segment and input embeddings, and the tied head."""

from locant.embedding.input import InputEmbedding as InputEmbedding
from locant.embedding.segment import SegmentEmbedding as SegmentEmbedding
from locant.embedding.table import TableSize as TableSize
from locant.embedding.table import table_sizes as table_sizes
from locant.embedding.token import TokenEmbedding as TokenEmbedding
