"""What a comparison found: curves, sentences, a table in the terminal, and a page."""
