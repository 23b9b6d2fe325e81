"""Attention with positions: `attend`, its backends (one file each), KV caches, and `merge` for partial results."""

from locant.attention.attend import attend as attend
from locant.attention.cache import KVCache as KVCache
from locant.attention.cache import StaticKVCache as StaticKVCache
from locant.attention.merge import merge as merge
from locant.attention.paged_cache import PagedKVCache as PagedKVCache
