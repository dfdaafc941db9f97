"""Text to tokens and back, so that every sampled token is used verbatim. Pure: no HTTP, no engine, no ledger.

::

    renderer.py    chat template and tokenizer: text of a conversation, ids of its new part
    canonical.py   when two messages are the same data
    tree.py        the forest of one session's turns: which recorded completion does a request continue?
    answers/       an answer's text <-> reasoning, content and tool calls, whole or as it streams
    json_text.py   the JSON inside an answer's text
    records.py     a closed trajectory -> what the trainer eats

How a request becomes a prompt: `tree` finds the longest recorded prefix with `canonical`, puts an unguessable marker
where each sampled answer stands, asks `renderer` for the text, proves that the old text is a prefix of it, and
tokenises only what follows.
"""
