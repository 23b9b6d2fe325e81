"""The token store: token ids on the disk, in files that other programs can read."""

from locant.text.store.export import Export, export_store
from locant.text.store.formats import register_format
from locant.text.store.formats.manifest import (
    MANIFEST,
    TOKENIZER,
    FileRecord,
    ShardRecord,
    read_manifest,
    shard_name,
    write_manifest,
)  # fmt: skip
from locant.text.store.formats.shard_writer import ShardWriter
from locant.text.store.store import TokenStore
from locant.text.store.token_files import token_dtype

__all__ = [
    "MANIFEST", "TOKENIZER", "Export", "FileRecord", "ShardRecord", "ShardWriter", "TokenStore", "export_store",
    "read_manifest", "register_format", "shard_name", "token_dtype", "write_manifest",
]  # fmt: skip
