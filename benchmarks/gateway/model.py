"""A tokenizer of 8,192 ids with a ChatML template, and answers of exactly 64 tokens in its language.

Byte-level BPE, trained on the source of Python's own standard library: text that every machine has.
"""

import sysconfig
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal_agent.models.recipe import CHAT_TEMPLATE

VOCAB_SIZE = 8192
NUM_FILES = 60
ANSWER_TOKENS = 64
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def build_tokenizer(folder: Path) -> Tokenizer:
    """Train the tokenizer, and save it as a Hugging Face folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return tokenizer


def library_texts() -> list[str]:
    """Return the first source files of the standard library, by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:NUM_FILES]
    return [file.read_text(errors="replace") for file in files]


def answers(tokenizer: Tokenizer, number: int) -> list[list[int]]:
    """Return answers as token ids: some words, a tool call, the end token; 64 ids each."""
    words = " ".join(library_texts()[0].split())
    end = SPECIAL_TOKENS.index("<|im_end|>")  # special tokens come first
    return [_answer(tokenizer, words[index * 37 :], index, end) for index in range(number)]


def _answer(tokenizer: Tokenizer, words: str, index: int, end: int) -> list[int]:
    call = f'<tool_call>\n{{"name": "search", "arguments": {{"query": "topic {index}", "limit": 5}}}}\n</tool_call>'
    call_ids = tokenizer.encode(call, add_special_tokens=False).ids
    num_words = ANSWER_TOKENS - 1 - len(call_ids)
    return tokenizer.encode(words[:2000], add_special_tokens=False).ids[:num_words] + call_ids + [end]
