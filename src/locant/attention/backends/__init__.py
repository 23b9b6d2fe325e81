"""The backends of attention: eager, sdpa, tiled and flex. Each file also states which inputs it does not support.

`locant.attention.choice` chooses between them.
"""
