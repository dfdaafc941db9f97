"""Text to tokens and back, so that every sampled token is used verbatim. Pure: no HTTP, no engine, no ledger.

::

    tree.py            the forest of one session's turns: places a request, adds its answers. Begin here
      prompt.py            its nodes: prompts and answers, each with what it adds
      lines.py             a conversation recognised as it was sent
      answers_by_data.py   ... or by what it says (canonical.py: when two messages are the same data)
      requests.py          which requests there were: repetitions, other tools, another system message
      completions.py       prompts that are no conversations
    continuation.py    what a turn adds to the path that it continues, from a stand-in (stand_in.py)
      walk.py              from the text of earlier answers to the tokens that stand for them
    renderer.py        chat template and tokenizer: text of a conversation, ids of its new part
      template.py          the template in its sandbox; keep_thinking.py derives one that strips no thinking
      control.py           special-token text in messages is said as plain text
    detokenizer.py     ids to text, at once or as they are sampled
    formats/           an answer's text <-> reasoning, content and tool calls, whole or as it streams
    json_text.py       the JSON inside an answer's text
    records.py         a closed trajectory -> what the trainer eats

How a request becomes a prompt: `tree` finds the longest recorded prefix, nearly always by comparing the messages as
they were sent; `continuation` renders a short stand-in of the conversation before and with what is new, proves that the
old text is a prefix of the new one, lets the answer stand as it was sampled, and tokenises only what follows it. Now
and then, and at the end, the whole conversation is rendered to prove that the stand-ins told the truth.
"""
