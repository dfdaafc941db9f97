"""What the text of an answer says: reasoning, content and tool calls, read whole or while it is sampled.

::

    answer_format.py   `AnswerFormat`: how a model writes, found by its chat template; parse, reader, format, opening
    base.py            the records, and `Family`: what a family of formats implements
    reader.py          `AnswerReader`: reads an answer in its order; decides what leaves and what is held back
    cursor.py          the text that a family reads from: literals, patterns, JSON
    hermes.py  llama3.py  mistral.py  deepseek.py      one family each

To add a family, write its file and give it a `ToolFormat`. The same code reads whole answers and streams: a family
reads a call from the text at hand, and is asked again from the call's beginning when that text was too short. So
nothing depends on where a stream was cut.
"""
