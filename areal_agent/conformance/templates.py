"""The chat templates at hand, each with a tokenizer: that of its model, or a small one made for it."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from areal_agent.errors import ConfigError
from areal_agent.tokens.renderer import ANSWER_MARKUP, Renderer
from areal_agent.types import JsonObject

UNSAID = "(unsaid)"
"""Given as empty thinking, which templates may leave out where they write any other; it is taken out of their text."""

CONTROL = re.compile(
    r"<\|[^\s<>|{}]{1,40}\|?>|<[a-z_]+\|>|<｜[^<>{}]{1,40}｜>|｜DSML｜|\[/?g?[A-Z_]{3,}\]|\]~!?b\[?|\[e~\[|"
    r"</?(?:s|bos|eos|sop|tool_response|arg_key|arg_value)>|</?(?:seed|minimax|mm|atem):\w+>|<\w+_of_\w+>|<SPECIAL_\d+>|"
    r"</?(?:assistant|user|system|sep)>"
)
"""The texts in templates that are tokens of their own in the models' tokenizers."""

_END = re.compile(r"</s>|<eos>|<seed:eos>|<\|(?:endoftext|end_of_text|return)\|>|<｜end▁of▁sentence｜>")


def make_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """Return a small byte-level tokenizer to which the control texts of a template are tokens."""
    texts = list(dict.fromkeys((*CONTROL.findall(chat_template), *sorted(ANSWER_MARKUP))))
    bos, eos = "<s>", next((text for text in texts if _END.fullmatch(text)), "</s>")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([chat_template], trainer)
    tokenizer.add_special_tokens([bos, eos, *(text for text in texts if not re.fullmatch(r"</?\w{3,}>", text))])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=chat_template
    )


class Subject:
    """A template that is tried: as the gateway uses it, and as transformers does.

    Raises ConfigError where the template cannot be used.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerFast, renderer: Renderer | None = None) -> None:
        self.name, self._tokenizer = name, tokenizer
        self.renderer = renderer or Renderer(tokenizer)
        self.template = cast("str", tokenizer.chat_template)
        derived = self.renderer.chat_template  # for tools, if it ends with the model's own
        self.used = derived if derived.endswith(self.template) else self.template
        self.ends = {*self.renderer.end_texts, cast("str", tokenizer.eos_token)}
        texts = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        self.control_ids = frozenset(texts)
        self.control_texts = [text for text in texts.values() if len(text.strip()) > 1 and text in self.template]

    def rendered(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], **more: Any) -> str | None:
        """Return what transformers renders of normalised messages, or None where the template refuses them.

        `apply_chat_template` leaves out what is null, also for templates that write calls only where the content is.
        Thinking has two names in it where transformers is newer than 5.17: here it always has both.
        """
        given: list[dict[str, Any]] = [dict(message) for message in messages]
        for message in given:
            if message.get("reasoning_content") is not None:
                message.setdefault("thinking", message["reasoning_content"])
        options: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True, **more}
        try:
            if all(message["content"] is not None for message in given):
                text = cast("str", self._tokenizer.apply_chat_template(given, tokenize=False, **options))
            else:
                options = {**self._tokenizer.special_tokens_map, **options}
                text = render_jinja_template([given], **options)[0][0]
        except Exception:  # the template is foreign code that runs on foreign data
            return None
        return text.replace(UNSAID, "")


def templates_at_hand(paths: Sequence[Path]) -> Iterator[tuple[str, PreTrainedTokenizerFast]]:
    """Yield the name and the tokenizer of each template in these places; without places: in all installed packages.

    Raises ConfigError for a place without any.
    """
    names = dict[str, str]()  # by template
    for path in paths or sorted(_packaged()):
        if (path / "tokenizer.json").is_file():
            yield path.name, PreTrainedTokenizerFast.from_pretrained(path)
            continue
        files = sorted(path.rglob("*.jinja")) if path.is_dir() else [path]
        sources = {file: file.read_text() for file in files if file.is_file()}
        sources = {file: source for file, source in sources.items() if "messages" in source and "role" in source}
        if paths and not sources:
            raise ConfigError(f"{path} has no chat template; give a model's folder, a .jinja file, or a folder of them")
        for file, source in sources.items():
            if source not in names:
                is_taken = file.stem in names.values()
                names[source] = f"{file.parent.name}/{file.stem}" if is_taken else file.stem
                yield names[source], make_tokenizer(source)


def _packaged() -> Iterator[Path]:
    files = (file for distribution in distributions() for file in distribution.files or () if file.suffix == ".jinja")
    return (Path(str(file.locate())) for file in files)
