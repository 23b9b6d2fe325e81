"""The token store: token ids on the disk, in files that other programs can read."""

from locant.text.store.finishing import write_manifest as write_manifest
from locant.text.store.layout import token_dtype as token_dtype
from locant.text.store.records import FileRecord as FileRecord
from locant.text.store.records import ShardRecord as ShardRecord
from locant.text.store.store import Format as Format
from locant.text.store.store import TokenStore as TokenStore
from locant.text.store.writer import ShardWriter as ShardWriter

__all__ = ["FileRecord", "Format", "ShardRecord", "ShardWriter", "TokenStore", "token_dtype", "write_manifest"]
