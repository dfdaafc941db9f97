"""What an engine says when it cannot: the body of an answer that is no success, and an event in mid-stream."""

from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a request failed. `status` is that of HTTP, also where the answer had begun with 200."""

    message: str
    status: int

    @property
    def is_refusal(self) -> bool:
        """Whether the request is wrong, and not the engine; one that has too much to do (429) refuses nothing."""
        return 400 <= self.status < 500 and self.status != 429


def encode_failure(failure: Failure) -> dict[str, Any]:
    """The body of every answer that is not a success; `success` is what weight updates look at."""
    message = failure.message
    return {"success": False, "message": message, "error": {"message": message, "code": failure.status}}


def decode_failure(body: object, status: int) -> Failure:
    """Read a failure, in either of SGLang's two shapes; `status` is the one to take when the body has none."""
    fields = cast(dict[str, Any], body) if isinstance(body, dict) else {}
    error = fields.get("error")
    nested = cast(dict[str, Any], error) if isinstance(error, dict) else {"message": error}
    message, code = nested.get("message") or fields.get("message"), nested.get("code")
    return Failure(
        message=message if isinstance(message, str) else f"{body!r}",
        status=code if type(code) is int else status,
    )
