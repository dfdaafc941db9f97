"""What an endpoint asks of a session: prompts to place in its forest, and how their answers are to be read."""

from collections.abc import Sequence
from typing import Protocol

from areal_agent.gateway.turns.order import Order
from areal_agent.gateway.turns.reading import Reading
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.tree import Forest, Prompt


class Question(Protocol):
    """One prompt: it becomes one turn."""

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        """Its place among the turns. Raises RequestError for what the agent did wrong."""
        ...

    def reading(self, renderer: Renderer, prompt: Prompt) -> Reading:
        """How the text of an answer is read."""
        ...


class Request(Protocol):
    """A checked body of an endpoint."""

    @property
    def model(self) -> str: ...

    @property
    def order(self) -> Order: ...

    @property
    def json_schema(self) -> str | None:
        """What every answer must match."""
        ...

    @property
    def is_single_call(self) -> bool:
        """Whether an answer ends with its first tool call."""
        ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def prompt_param(self) -> str:
        """The parameter that holds its prompts."""
        ...

    def questions(self) -> Sequence[Question]:
        """Its prompts, at least one."""
        ...
