"""Whether a server serves the model of the others. Knows what servers say of themselves, and no server."""

from areal_agent.engine_types import EngineInfo
from areal_agent.errors import ServerRefused


def check_model(url: str, info: EngineInfo, known: EngineInfo) -> None:
    """Raise ServerRefused when a server that is `info` cannot stand in for those that are `known`."""
    fault = _fault(info, known)
    if fault is not None:
        raise ServerRefused(f"{url} {fault}", code="another_model")


def _fault(info: EngineInfo, known: EngineInfo) -> str | None:
    if info.vocab_size != known.vocab_size:
        return (
            f"serves {info.model_path}, with {info.vocab_size} ids, and the others {known.model_path}, with "
            f"{known.vocab_size}; start it with their model"
        )
    if info.max_context_tokens < known.max_context_tokens:
        return (
            f"has a context of {info.max_context_tokens} tokens, and the others {known.max_context_tokens}; start it "
            "with theirs"
        )
    if known.has_grammar and not info.has_grammar:
        return "does not constrain answers to a grammar, and the others do; start it as they were"
    return None
