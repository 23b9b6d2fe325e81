"""The public names. Each is imported when it is first used: the settings load no torch."""

from .comparison import Progress as Progress
from .comparison import compare as compare
from .decoder import Decoder as Decoder
from .generation import load as load
from .generation import save as save
from .results import Record as Record
from .results import Results as Results
from .results import environment as environment
from .sampling import generate as generate
from .settings import Settings as Settings
from .training import train as train
from .tuning import TuneSettings as TuneSettings
from .tuning import tune as tune
