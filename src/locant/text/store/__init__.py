"""The token store: token ids on the disk, in files that other programs can read."""

from locant.text.store.formats import register_format
from locant.text.store.formats.base import token_dtype
from locant.text.store.formats.locant import TOKENIZER, read_manifest, write_manifest
from locant.text.store.formats.shards import MANIFEST, FileRecord, ShardRecord, ShardWriter, shard_name
from locant.text.store.store import Export, TokenStore, export_store

__all__ = [
    "MANIFEST", "TOKENIZER", "Export", "FileRecord", "ShardRecord", "ShardWriter", "TokenStore", "export_store",
    "read_manifest", "register_format", "shard_name", "token_dtype", "write_manifest",
]  # fmt: skip
