"""Keys: the admin key of a gateway and the key of each session. Only their SHA-256 is ever kept or compared."""

import hmac
import secrets
from collections.abc import Mapping
from hashlib import sha256

from areal_agent.errors import RequestError


def new_key() -> str:
    """An unguessable key in the form that OpenAI's clients expect."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """SHA-256, hexadecimal: what the ledger has of a key."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_same_key(key_hash_a: str, key_hash_b: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(key_hash_a, key_hash_b)


def bearer_hash(headers: Mapping[str, str]) -> str:
    """The hash of the key that a request came with; raises RequestError when it has none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise RequestError(
            "no API key; send the header 'Authorization: Bearer sk-...'", status=401, code="invalid_api_key"
        )
    return key_hash(key.strip())
