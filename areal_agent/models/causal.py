"""Whether a model can be trained as a causal language model, as far as its config.json tells.

It asks transformers' tables, which come with torch: preflight does it in a process of its own, the trainer directly.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto import modeling_auto as tables

INSTEAD = "use a causal (decoder-only) language model"


def fault_of(fields: Mapping[str, Any]) -> str:
    """Return why the model of this config.json can never be trained, with the remedy; nothing where that is not known.

    >>> fault_of({"model_type": "t5", "is_encoder_decoder": True})
    'type t5 is an encoder-decoder; use a causal (decoder-only) language model'
    """
    kind, quantised = fields.get("model_type"), fields.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method")
        return f"its weights are quantised ({method}), and only plain floats are trained; use the model it was made of"
    if kind not in CONFIG_MAPPING:
        own = ", and code that comes with a model is not run" if fields.get("auto_map") else ""
        return f"transformers {__version__} has no type {kind!r}{own}; correct its config.json, or use another model"
    if fields.get("is_encoder_decoder"):
        return f"type {kind} is an encoder-decoder; {INSTEAD}"
    if kind in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not fields.get("is_decoder"):
        return f"type {kind} is an encoder, which predicts masked tokens; {INSTEAD}"
    if kind in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ""
    if kind in tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return f"type {kind} is a vision-language model, whose text transformers does not load alone; {INSTEAD}"
    return f"transformers has no causal language model of type {kind}; {INSTEAD}"
