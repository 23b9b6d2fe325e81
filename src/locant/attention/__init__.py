"""Attention with positions: `attend`, its backends, one file each, and the KV cache."""

from locant.attention.attend import attend as attend
from locant.attention.cache import KVCache as KVCache
