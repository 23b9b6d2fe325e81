"""Output for people: tables in the terminal and the report of a comparison.

Nothing here trains or computes. Each function that needs rich imports it.
"""
