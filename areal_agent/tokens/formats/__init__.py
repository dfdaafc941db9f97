"""Reads the text of an answer as reasoning, content and tool calls, whole or while it is sampled.

::

    answer_format.py   `AnswerFormat`: how a model writes, detected in its chat template; parse, reader, format, opening
    base.py            the records, and `Family`: what a family of formats implements
    reader.py          `AnswerReader`: reads an answer in order; decides what leaves and what is held back
    cursor.py          `Cursor`: the text that a family reads from: literals, patterns, JSON
    hermes.py  llama3.py  mistral.py  deepseek.py      one family each

To add a family, write its file, add a `ToolFormat` and enter it in `_FAMILIES`. The same code reads whole answers and
streams: a family reads a call from the text at hand, and starts the call again when that text was too short. So the
result does not depend on where a stream was cut.
"""
