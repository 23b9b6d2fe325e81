"""Hugging Face configurations and rotary encodings, one read as the other.

`config` is the way in and out; `dialects` the table of what each architecture calls its keys, `layers` what differs
from layer to layer, `sizes` heads and lengths, `types` the scalings. Every key is honoured or refused by name.
"""
