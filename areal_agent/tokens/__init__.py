"""Turns messages into token ids and back, so that every sampled token is used verbatim.

::

    forest.py          the forest of a session's turns: places each request, records its answers. Begin here
      prompt.py        the forest's nodes (prompts and answers), and stand-ins for long conversations
      recognition.py   finds what a request repeats or continues, by comparing it as sent or by what it says
      canonical.py     when two messages are the same data; strict JSON
      continuation.py  the text and tokens that a turn adds to the path that it continues
    renderer.py        a model's chat template and tokenizer: messages to text, text to ids, ids to text
      vision.py        what a model that sees makes of images: how many tokens, and marks for them in text
      words.py         a cache of the ids of words in front of the tokenizer
      template.py      the sandboxed chat template, and one derived from it that keeps earlier thinking
    formats/           an answer's text <-> reasoning, content and tool calls, whole or as it streams
    records.py         a closed trajectory -> the trainer's `TokenRecord`s
      loss_rule.py     which sampled tokens are in the loss, and why the others are not

`Forest.plan` turns a request into a prompt in four steps. It finds the longest recorded prefix, nearly always by
comparing the messages as they were sent. `Continuation` renders a short stand-in for the conversation, once as it was
and once with the new messages, and checks that the old text is a prefix of the new text. The earlier answer keeps its
sampled tokens. Only the text after it is tokenised. At growing intervals, and at the end, the whole conversation is
rendered to prove that the stand-ins gave the right text.
"""
