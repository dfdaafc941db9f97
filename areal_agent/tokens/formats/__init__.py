"""Reads the text of an answer as reasoning, content and tool calls, whole or while it is sampled.

::

    answer_format.py   `AnswerFormat`: how a model writes; parse, reader, format, opening
    detection.py       finds the format of a chat template by rendering a call, and the form of messages that it wants
    base.py            the records, and `Family`: what a family of formats implements
    reader.py          `AnswerReader`: reads an answer in order; decides what leaves and what is held back
    cursor.py          `Cursor`: the text that a family reads from: literals, patterns, JSON
    thinking.py        the tags of reasoning
    hermes.py  llama3.py  mistral.py  deepseek.py  kimi.py      families whose arguments are JSON
    literals.py        those whose arguments are other literals: Gemma, Llama 4
    xml.py             those with a tag for each argument: Qwen3-Coder, GLM, MiniMax, Seed-OSS, DeepSeek V3.2, as tables
    values.py          gives their values, which are bare text, the types that the tools' schemas say
    harmony.py         gpt-oss, whose answers are messages in channels

To add a family, write its file, add a `ToolFormat` and enter it in `_FAMILIES`. The same code reads whole answers and
streams: a family reads a call from the text at hand, and starts the call again when that text was too short. So the
result does not depend on where a stream was cut.
"""
