"""Log-probabilities as the two endpoints tell them. It knows no answer but its token rows."""

from collections.abc import Sequence
from typing import Any

from areal_agent.gateway.turns.draft import TokenRow
from areal_agent.tokens.detokenizer import Detokenizer


def chat_logprobs(rows: Sequence[TokenRow], num_top: int, detokenizer: Detokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat's choice: each token's text, bytes and log-probability, and the likeliest beside it."""
    return {
        "content": [
            _entry(row.token_id, row.logprob, detokenizer)
            | {"top_logprobs": [_entry(*one, detokenizer) for one in row.top_logprobs[:num_top]]}
            for row in rows
        ]
    }


def completion_logprobs(
    rows: Sequence[TokenRow], num_top: int, detokenizer: Detokenizer, *, first_offset: int
) -> dict[str, Any]:
    """The `logprobs` of a plain completion: four columns. `first_offset`: how much text comes before the answer."""
    return {
        "tokens": [_text(row.token_id, detokenizer) for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [_by_text(row, num_top, detokenizer) for row in rows] if num_top else None,
        "text_offset": [first_offset + row.start for row in rows],
    }


def _entry(token_id: int, logprob: float, detokenizer: Detokenizer) -> dict[str, Any]:
    data = detokenizer.bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _by_text(row: TokenRow, num_top: int, detokenizer: Detokenizer) -> dict[str, float]:
    """OpenAI's form has one log-probability a text: of several tokens that look alike, the likeliest."""
    likeliest = dict[str, float]()
    for token_id, logprob in row.top_logprobs[:num_top]:
        likeliest.setdefault(_text(token_id, detokenizer), logprob)
    return likeliest


def _text(token_id: int, detokenizer: Detokenizer) -> str:
    return detokenizer.bytes_of(token_id).decode(errors="replace")
