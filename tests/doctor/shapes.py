"""The sizes of published models, from their config.json, for tests that reach no hub."""

from areal_agent.doctor.model import ModelShape


def qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> ModelShape:
    return ModelShape.of(
        {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
    )


QWEN3_06B = qwen3(1024, 3072, 28, 16)
QWEN3_17B = qwen3(2048, 6144, 28, 16)
QWEN3_4B = qwen3(2560, 9728, 36, 32)
