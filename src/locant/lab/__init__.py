"""Experiments: a small decoder that calls the three doors, its training loop, and the comparison of encodings."""

from locant.lab.compare import Progress as Progress
from locant.lab.compare import Record as Record
from locant.lab.compare import Results as Results
from locant.lab.compare import Settings as Settings
from locant.lab.compare import compare as compare
from locant.lab.decoder import Decoder as Decoder
from locant.lab.environment import environment as environment
