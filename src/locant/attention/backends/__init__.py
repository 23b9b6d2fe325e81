"""How attention is computed: one file each for eager, sdpa, tiled and flex, with what keeps it from running.

Which of them runs is decided in `locant.attention.choice`.
"""
