"""`locant compare`: what a comparison found, as curves, sentences, a table and a page."""
