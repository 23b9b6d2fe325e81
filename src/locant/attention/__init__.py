"""Attention with positions: `attend`, its backends side by side, and the KV cache."""

from locant.attention.attend import attend as attend
from locant.attention.cache import KVCache as KVCache
