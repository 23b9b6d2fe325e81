"""Embed ids as vectors: token, segment and input embeddings, and the tied head."""

from locant.embedding.input import InputEmbedding as InputEmbedding
from locant.embedding.look_back import TokenHistory as TokenHistory
from locant.embedding.ngram import NGramEmbedding as NGramEmbedding
from locant.embedding.ngram import compressed_ids as compressed_ids
from locant.embedding.ngram_gate import NGramGate as NGramGate
from locant.embedding.ngram_hash import NGramHash as NGramHash
from locant.embedding.per_layer import PerLayerEmbedding as PerLayerEmbedding
from locant.embedding.per_layer import PerLayerGate as PerLayerGate
from locant.embedding.quantised import QuantisationError as QuantisationError
from locant.embedding.quantised import QuantisedEmbedding as QuantisedEmbedding
from locant.embedding.sparse_rows import RowAdagrad as RowAdagrad
from locant.embedding.sparse_rows import SparseTable as SparseTable
from locant.embedding.sparse_rows import read_ahead as read_ahead
from locant.embedding.table import TableSize as TableSize
from locant.embedding.table import table_sizes as table_sizes
from locant.embedding.table_file import TableFile as TableFile
from locant.embedding.token import Nearest as Nearest
from locant.embedding.token import SegmentEmbedding as SegmentEmbedding
from locant.embedding.token import TokenEmbedding as TokenEmbedding
from locant.embedding.words import Term as Term
from locant.embedding.words import Words as Words
from locant.embedding.words import terms_of as terms_of
