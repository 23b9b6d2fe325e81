"""The token store: token ids on the disk, in files that other programs can read."""

from locant.text.store.export import Export as Export
from locant.text.store.export import export_store as export_store
from locant.text.store.formats import register_format as register_format
from locant.text.store.formats.manifest import MANIFEST as MANIFEST
from locant.text.store.formats.manifest import TOKENIZER as TOKENIZER
from locant.text.store.formats.manifest import read_manifest as read_manifest
from locant.text.store.formats.manifest import shard_name as shard_name
from locant.text.store.formats.manifest import write_manifest as write_manifest
from locant.text.store.formats.records import FileRecord as FileRecord
from locant.text.store.formats.records import ShardRecord as ShardRecord
from locant.text.store.formats.shard_writer import ShardWriter as ShardWriter
from locant.text.store.store import TokenStore as TokenStore
from locant.text.store.token_files import token_dtype as token_dtype

__all__ = [
    "MANIFEST",
    "TOKENIZER",
    "Export",
    "FileRecord",
    "ShardRecord",
    "ShardWriter",
    "TokenStore",
    "export_store",
    "read_manifest",
    "register_format",
    "shard_name",
    "token_dtype",
    "write_manifest",
]
