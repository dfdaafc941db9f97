"""The one tool call that is being read: what is known of it, and how much of it has left. It knows no format.

A call leaves from the moment when its name is known and its arguments have begun: first the name, then the arguments as
they come. Before that, and where calls are taken whole, nothing leaves, for the text may prove to be no call.
"""

from collections.abc import Callable

from areal_agent.tokens.answers.parsed import AnswerDelta, ToolCall
from areal_agent.tokens.answers.tape import MalformedCall, Tape
from areal_agent.tokens.json_text import parse_json_object


class OpenCall:
    """Told by the form's rule what has been taken off the tape."""

    def __init__(self, tape: Tape, *, index: int, is_streamed: bool, emit: Callable[[AnswerDelta], None]) -> None:
        self._tape = tape
        self._index = index
        self.is_streamed = is_streamed
        self._emit = emit
        self._name: str | None = None
        self._arguments: list[str] = []
        self._num_read = 0  # how many of the tape's pieces are in `_arguments`, or before them
        self._has_arguments = False
        self.are_arguments_open = False
        self.has_left = False

    @property
    def has_begun(self) -> bool:
        """Whether this is a call beyond doubt, if perhaps a broken one."""
        return self._name is not None and self._has_arguments

    def set_name(self, name: str) -> None:
        if self._name is not None or not name:
            raise MalformedCall
        self._name = name

    def begin_arguments(self) -> None:
        """The tape's last piece is the `{` of the arguments."""
        if self._has_arguments:
            raise MalformedCall
        self._has_arguments = self.are_arguments_open = True
        self._num_read = len(self._tape.taken) - 1
        if self.is_streamed and self._name is not None:
            self._leave()

    def flush(self) -> None:
        """Let go what has been taken of the arguments."""
        if self.are_arguments_open:
            taken = self._tape.taken
            self.add_arguments("".join(taken[self._num_read :]))
            self._num_read = len(taken)

    def add_arguments(self, text: str) -> None:
        """More of the arguments, of a call that broke off: what the rule did not take."""
        if text:
            self._arguments.append(text)
            if self.has_left:
                self._emit(AnswerDelta(call_index=self._index, arguments=text))

    def end_arguments(self) -> None:
        """The tape's last piece is the `}` of the arguments."""
        self.flush()
        self.are_arguments_open = False

    def tool_call(self) -> ToolCall | None:
        """The call, broken if its arguments are no JSON object; None if it has no name or no arguments."""
        if self._name is None or not self._has_arguments:
            return None
        text = "".join(self._arguments)
        arguments = parse_json_object(text)
        return ToolCall(name=self._name, arguments=text if arguments is None else arguments)

    def leave_whole(self) -> None:
        """Let go a call of which nothing has left yet."""
        if not self.has_left:
            self._leave()
            self._emit(AnswerDelta(call_index=self._index, arguments="".join(self._arguments)))

    def _leave(self) -> None:
        self.has_left = True
        self._emit(AnswerDelta(call_index=self._index, call_name=self._name))
