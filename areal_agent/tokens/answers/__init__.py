"""What an answer's text says: reasoning, content and tool calls, whole or as it streams. Text in, records out.

::

    answer_format.py   `AnswerFormat`: how a model writes; parse, reader, format, opening. Begin here
    detection.py       which format a chat template writes
    parsed.py          the records: ToolCall, ParsedAnswer, AnswerDelta
       ├─▶ at_once.py        whole answers in Hermes' plain form, quickly; all others:
    reader.py          `AnswerReader`: the order of an answer; what leaves, what is held back, what is malformed
       ├─▶ prose.py          reasoning or content: the white space at its ends
       ├─▶ call.py           the one call that is being read
       └─▶ dialect.py        what a form of tool calls must tell
              hermes.py  llama3.py  mistral.py  deepseek.py     the forms, each in one file
              envelope.py    {"name": ..., "arguments": {...}}, which most of them share
              json_scan.py   where a JSON value ends
    tape.py            text that is still coming: what all of the above read from

One grammar serves both ways of reading. Every rule is a generator that takes text off the tape and yields when it needs
more; a whole text is a tape that ends at once. So nothing can depend on where a stream was cut. `at_once` only saves
time: it says what the grammar says, or nothing.
"""
