"""Models that can never be trained are named as what they are, with a remedy; others pass."""

import pytest

from areal_agent.models.causal import fault_of


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"model_type": "qwen3"}, ""),
        ({"model_type": "gemma3", "text_config": {}}, ""),  # its text is loaded without its images
        ({"model_type": "bert", "is_decoder": True}, ""),
        ({"model_type": "bert"}, "type bert is an encoder, which predicts masked tokens; use a causal"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "type bart is an encoder-decoder; use a causal"),
        ({"model_type": "qwen2_5_vl"}, ""),  # as a whole
        ({"model_type": "llava"}, "type llava is a vision-language model"),
        ({"model_type": "clip"}, "no causal language model of type clip"),
        ({"model_type": "frobnicate"}, "has no type 'frobnicate'; correct"),
        ({"model_type": "frobnicate", "auto_map": {"AutoConfig": "x"}}, "code that comes with a model is not run"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, r"are quantised (mxfp4)"),
    ],
)
def test_what_cannot_be_trained_is_named(fields: dict[str, object], fault: str) -> None:
    found = fault_of(fields)
    assert fault in found if fault else not found
