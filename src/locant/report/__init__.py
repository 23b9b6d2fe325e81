"""What people read: tables in the terminal, and the report of a comparison.

Nothing here trains or computes. rich is imported by the functions that need it.
"""
