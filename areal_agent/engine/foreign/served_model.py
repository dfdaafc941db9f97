"""What has to be known of the model behind a server, and what servers do not tell: read from the model's folder.

SGLang dies of a token id outside the vocabulary, and servers load weights of any shape: both are checked on this side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal_agent.engine.fields import WireError, as_integer, as_object, decode_json
from areal_agent.engine.foreign.adapters import is_adapter, prove_adapter
from areal_agent.engine.foreign.tensors import prove_fits, read_shapes
from areal_agent.engine_types import TensorEntry
from areal_agent.errors import EngineError, EngineRejected, WeightUpdateError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The ids that it knows, and the names and shapes of its weights."""

    folder: Path
    vocab_size: int
    is_tied: bool  # its head is its embedding
    shapes: Mapping[str, tuple[int, ...]]
    has_adapters: bool = False  # the server applies some as it samples: merged weights would be so twice

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a Hugging Face folder. Raises EngineRejected when it is none, or on another machine."""
        try:
            fields = as_object(decode_json((folder / "config.json").read_bytes()), "config.json")
            vocab_size = as_integer(fields.get("vocab_size"), "vocab_size")
            shapes = read_shapes(folder)
        except (OSError, WireError, EngineError) as error:
            raise EngineRejected(
                f"the server says that it serves {str(folder)!r}, which cannot be read here: {error}; start it "
                "with the path of a folder that this machine sees, too"
            ) from error
        is_tied = fields.get("tie_word_embeddings") is True
        return cls(folder=folder, vocab_size=vocab_size, is_tied=is_tied, shapes=shapes)

    def prove(self, weights: Path) -> None:
        """Raises WeightUpdateError unless the weights in this folder fit, all; where it applies adapters, these."""
        if is_adapter(weights):
            if not self.has_adapters:
                raise WeightUpdateError(
                    f"{str(weights)!r} has adapters, and the server was started without any; set trainer.lora.push to "
                    "'merged'"
                )
            prove_adapter(weights, self.shapes)
        else:
            self._require_plain()
            prove_fits(read_shapes(weights), self.shapes, is_tied=self.is_tied, where=f"in {str(weights)!r}")

    def prove_entries(self, entries: Sequence[TensorEntry]) -> None:
        """The same of weights that are not here, and of a whole model."""
        self._require_plain()
        shapes = {entry.name: entry.shape for entry in entries}
        prove_fits(shapes, self.shapes, is_tied=self.is_tied, where="that were published")

    def _require_plain(self) -> None:
        if self.has_adapters:
            raise WeightUpdateError(
                "the server applies adapters to its model, and would to a whole one that has them in it; push adapters"
            )
