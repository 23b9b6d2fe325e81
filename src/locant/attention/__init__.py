"""Attention with positions: `attend`, its backends, one file each, the KV cache, and what joins parts of attention."""

from locant.attention.attend import attend as attend
from locant.attention.cache import KVCache as KVCache
from locant.attention.merge import merge as merge
