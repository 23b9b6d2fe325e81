"""Published models: how their configurations describe positions, one row per architecture.

To support another architecture, add a row to its family (`llama`, `mixed_layers`, `deepseek`, `gpt`,
`additive_positions`, `vision`, ...): an `Architecture` under its ``model_type``, with the keys that differ from
Llama's. Code outside this package calls `register_architecture` instead. `Rotary.from_config`, `encoding_from_config`,
`convert_layout`, `InputEmbedding.from_pretrained`, ``locant explain`` and ``locant extend`` know architectures only
from these rows.
"""

from locant.models.architecture import Architecture as Architecture
from locant.models.architecture import LayerKind as LayerKind
from locant.models.architecture import RotaryKeys as RotaryKeys
from locant.models.config_values import required as required
from locant.models.encodings import encoding_from_config as encoding_from_config
from locant.models.encodings import encodings_by_layer as encodings_by_layer
from locant.models.encodings import layer_types as layer_types
from locant.models.registry import register_architecture as register_architecture
from locant.models.registry import with_defaults as with_defaults
from locant.models.weights import InputTables as InputTables
from locant.models.weights import group_by_group as group_by_group
from locant.models.weights import one_after_another as one_after_another
from locant.probing.bias import BiasReport as BiasReport
from locant.probing.report import Report as Report
from locant.probing.report import RotationReport as RotationReport
