"""Pictures of encodings: one file per kind, and the choice of the one for a given encoding."""
