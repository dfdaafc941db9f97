"""Token ids back to text, at once or as they are sampled. It knows no template and no message.

A byte-level BPE gives each id its exact bytes, so text leaves with the token that completes it. Other tokenizers
decide by context (SentencePiece drops a leading space): there a window of recent ids is decoded again.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no UTF-8 are shown as


MAX_TOKEN_BYTES = 1024  # longer than any token of a vocabulary


class TextStream(Protocol):
    """Text of ids that come one by one: all pieces together are the text of all ids."""

    def feed(self, token_id: int) -> str:
        """The text that is certain with this id; the beginning of a character is held back."""
        ...

    def finish(self) -> str:
        """What was held back; there are no more ids."""
        ...


class Detokenizer:
    """The way from ids to text of one tokenizer. Safe to use from several threads.

    >>> Detokenizer(Tokenizer.from_file("tokenizer.json")).text_of([5, 6])          # doctest: +SKIP
    'hello'
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._is_byte_level = isinstance(backend.decoder, ByteLevel)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id: exact for a byte-level BPE, those of its text alone elsewhere."""
        if not self._is_byte_level:
            return self.text_of([token_id]).encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else _bytes_of_token(token)

    def num_tokens_through(self, mark: str, token_ids: Sequence[int]) -> int:
        """How many ids there are up to the end of `mark` in their text; all of them where it is not."""
        mark_id = self._backend.token_to_id(mark)
        if mark_id is not None and mark_id in token_ids:
            return token_ids.index(mark_id) + 1
        told = bytearray()
        for num_tokens, token_id in enumerate(token_ids, start=1):
            told += self.bytes_of(token_id)
            if mark.encode() in told[-len(mark) - MAX_TOKEN_BYTES :]:
                return num_tokens
        return len(token_ids)

    def stream(self) -> TextStream:
        """Begin an answer."""
        return _ByteStream(self) if self._is_byte_level else _WindowStream(self)


class _ByteStream:
    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._detokenizer.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Decodes the last ids together with those before whose text is out, so that context is as in the whole."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._shown_ids: list[int] = []  # their text has left; they are the context of the pending ones
        self._pending_ids: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending_ids.append(token_id)
        text = self._pending_text()
        return "" if not text or text.endswith(REPLACEMENT) else self._show(text)

    def finish(self) -> str:
        return self._show(self._pending_text())

    def _pending_text(self) -> str:
        context = self._detokenizer.text_of(self._shown_ids)
        return self._detokenizer.text_of(self._shown_ids + self._pending_ids)[len(context) :]

    def _show(self, text: str) -> str:
        self._shown_ids, self._pending_ids = self._pending_ids or self._shown_ids, []
        return text


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _bytes_of_token(token: str) -> bytes:
    """An added token with a character outside the alphabet stands for its own text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()
