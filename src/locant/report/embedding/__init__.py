"""`locant embed`: what flows from a text to its embeddings, stage by stage."""
