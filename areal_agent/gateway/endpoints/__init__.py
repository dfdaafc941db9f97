"""What agents send and get, in OpenAI's forms: each endpoint reads its body strictly and writes its own answers.

::

    chat.py  chat_body.py                  /v1/chat/completions, its request and its answer
    completions.py  completions_body.py    /v1/completions
    conversation.py                        messages and tools
    tool_choice.py  response_format.py     two parameters with a form of their own
    logprobs.py                            log-probabilities, as each endpoint tells them

It knows nothing of sessions and engines.
"""
