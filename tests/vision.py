"""A vision model of the tests' own: Qwen2.5-VL with random weights, its processor, and pictures to ask about.

    python tests/vision.py OUT

A picture of 56 x 56 pixels is four tokens (patches of 14, merged two by two).
"""

import io
import json
import sys
from pathlib import Path

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "black": (0, 0, 0)}

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
PLAIN = ("<|video_pad|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# As Qwen2.5-VL's, with Hermes tools as Qwen3-VL has them: content is a text, or texts and images.
TEMPLATE = """\
{%- macro said(content) -%}
{%- if content is string %}{{ content }}{% else %}
{%- for part in content %}
{%- if part.type == 'image' or 'image' in part %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + said(message.content) + '\\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + said(message.content) }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

CORPUS = (
    "what colour is the picture? red green blue black",
    "system user assistant tool name arguments click key page",
    '{"name": "click", "arguments": {"x": 1, "y": 2}}',
)

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 224 * 224,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def make_vision_model(folder: Path, seed: int = 0) -> Path:
    """Write a model of about 180,000 parameters into `folder`, with its tokenizer, template and processor."""
    tokenizer = _tokenizer()
    ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in (*SPECIAL, *PLAIN)}  # type: ignore[arg-type]
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,  # of 32: on a CPU, vLLM takes no less
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[one for one in SPECIAL if "vision" in one or "pad" in one],
        chat_template=TEMPLATE,
    )


def picture(colour: str, *, size: tuple[int, int] = (56, 56), kind: str = "PNG") -> bytes:
    """Return a file of one colour, as PNG, JPEG or WEBP."""
    file = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(file, kind)
    return file.getvalue()


if __name__ == "__main__":
    print(make_vision_model(Path(sys.argv[1])))
