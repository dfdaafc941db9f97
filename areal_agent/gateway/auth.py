"""Keys: the admin key of a gateway and the key of each session. Only their SHA-256 is ever kept or compared.

A session is looked up by that hash in a dictionary. How long this takes tells a guesser nothing of any key: he cannot
choose the hash of what he guesses.
"""

import hmac
import re
import secrets
from collections.abc import Mapping
from hashlib import sha256

from areal_agent.errors import RequestError

MIN_HIDDEN_CHARS = 8
"""A caller's key shorter than this is no secret, and may be part of any word."""

_LIKE_A_KEY = re.compile(r"sk-[\w-]{12,}")


def new_key() -> str:
    """An unguessable key in the form that OpenAI's clients expect."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """SHA-256, hexadecimal: what the ledger has of a key."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_same_key(key_hash_a: str, key_hash_b: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(key_hash_a, key_hash_b)


def caller_hash(headers: Mapping[str, str]) -> str:
    """The hash of the key that a request came with; raises RequestError when it has none."""
    key = _key_in(headers)
    if not key:
        raise RequestError(
            "no API key; send the header 'Authorization: Bearer sk-...', 'api-key' or 'x-api-key'",
            status=401,
            code="invalid_api_key",
        )
    return key_hash(key)


def without_keys(text: str, headers: Mapping[str, str]) -> str:
    """A text that is going into an answer or a log, with neither the caller's key nor anything that looks like one.

    >>> without_keys("no model 'sk-0123456789abcdef'; you are hunter22", {"x-api-key": "hunter22"})
    "no model 'sk-***'; you are ***"
    """
    key = _key_in(headers)
    if len(key) >= MIN_HIDDEN_CHARS:
        text = text.replace(key, "***")
    return _LIKE_A_KEY.sub("sk-***", text)


def _key_in(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("api-key") or headers.get("x-api-key") or ""
    return key.strip()
