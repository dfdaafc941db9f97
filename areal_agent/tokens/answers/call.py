"""The one tool call that is being read: what is known of it, and how much of it has left. It knows no format.

A call leaves from the moment when its name is known and its arguments have begun: first the name, then the arguments as
they come. Before that, and where calls are taken whole, nothing leaves, for the text may prove to be no call. The last
bracket of the arguments leaves when the whole call has been read: without it nobody can run a broken one.
"""

from collections.abc import Callable

from areal_agent.tokens.answers.parsed import AnswerDelta, ToolCall
from areal_agent.tokens.answers.tape import MalformedCall, Tape
from areal_agent.tokens.canonical import parse_json_object


class OpenCall:
    """Told by the form's rule what has been taken off the tape."""

    def __init__(
        self,
        tape: Tape,
        *,
        index: int,
        only_tool: str | None,
        is_streamed: bool,
        emit: Callable[[AnswerDelta], None],
    ) -> None:
        self._tape = tape
        self._index = index
        self._only_tool = only_tool  # None: any
        self.is_streamed = is_streamed
        self._emit = emit
        self._name: str | None = None
        self._arguments: list[str] = []  # in pieces, without the last bracket until the call is whole
        self._num_read = 0  # how many of the tape's pieces are in `_arguments`, or before them
        self._num_told = 0  # how many pieces of `_arguments` have left
        self._has_arguments = False
        self.are_arguments_open = False
        self.has_left = False

    @property
    def has_begun(self) -> bool:
        """Whether this is a call beyond doubt, if perhaps a broken one."""
        return self._name is not None and self._has_arguments

    def set_name(self, name: str) -> None:
        if self._name is not None or not name or self._only_tool not in (None, name):
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
        self._read_on()
        self._tell()

    def add_arguments(self, text: str) -> None:
        """More of the arguments, of a call that broke off: what the rule did not take."""
        self._arguments.append(text)
        self._tell()

    def end_arguments(self) -> None:
        """The tape's last piece ends with the `}` of the arguments."""
        self._read_on()
        self._arguments[-1] = self._arguments[-1][:-1]
        self.are_arguments_open = False

    def end(self, *, is_complete: bool) -> ToolCall | None:
        """The call; None if it has no name or no arguments. `is_complete`: it has been read to its end.

        Broken, and without its last bracket, if it is not complete or its arguments are no JSON object.
        """
        if self._name is None or not self._has_arguments:
            return None
        text = "".join(self._arguments)
        arguments = parse_json_object(text + "}") if is_complete else None
        if arguments is None:
            return ToolCall(name=self._name, arguments=text)
        self._arguments.append("}")
        return ToolCall(name=self._name, arguments=arguments)

    def leave(self) -> None:
        """Let go all that has not left yet."""
        if not self.has_left:
            self._leave()
        self._tell()

    def _leave(self) -> None:
        self.has_left = True
        self._emit(AnswerDelta(call_index=self._index, call_name=self._name))

    def _read_on(self) -> None:
        if self.are_arguments_open:
            self._arguments += self._tape.taken[self._num_read :]
            self._num_read = len(self._tape.taken)

    def _tell(self) -> None:
        if self.has_left and (text := "".join(self._arguments[self._num_told :])):
            self._emit(AnswerDelta(call_index=self._index, arguments=text))
            self._num_told = len(self._arguments)
