"""Whether a model can be trained, as far as its config.json tells: by text, or by text and images.

It asks transformers' tables, which come with torch: preflight does it in a process of its own, the trainer directly.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto import modeling_auto as tables

from areal_agent.images import PROCESSOR

INSTEAD = "use a causal (decoder-only) language model"
WITH_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Types that are trained as a whole; of others that take images the text alone, where transformers has it."""


def takes_images(fields: Mapping[str, Any], *, has_processor: bool) -> bool:
    """Return whether the model of this config.json is trained with images, which it has a processor for."""
    return fields.get("model_type") in WITH_IMAGES and has_processor


def fault_of(fields: Mapping[str, Any], *, has_processor: bool = True) -> str:
    """Return why the model of this config.json can never be trained, with the remedy; nothing where that is not known.

    `has_processor` says whether its folder tells what becomes of images (`images.has_processor`).

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
    if kind in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or takes_images(fields, has_processor=has_processor):
        return ""
    if kind in WITH_IMAGES:
        return f"type {kind} takes images, and {PROCESSOR} is missing; put that of the model beside its config.json"
    if kind in tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return (
            f"type {kind} is a vision-language model, whose text transformers does not load alone; {INSTEAD}, or a "
            f"vision-language model of {', '.join(WITH_IMAGES)}"
        )
    return f"transformers has no causal language model of type {kind}; {INSTEAD}"
