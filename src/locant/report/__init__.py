"""What people look at: pictures of encodings, tables in the terminal, and the report of a comparison.

Nothing here trains or computes anything new; it draws and words what the rooms below return. matplotlib and rich are
imported by the functions that need them.
"""
