"""Output for people: tables in the terminal and the report of a comparison.

This package does not train or measure. Each function that needs rich imports it.
"""
