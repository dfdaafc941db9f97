"""The quickstart's model: about a million parameters, built and warm-started on this machine in a minute or two.

    recipe.py         every number of it
    chat_template.py  how it reads a conversation
    tokenizer.py      a byte-level BPE in which every digit is a token
    demonstrations.py loads what it is warm-started on
    warm_start.py     supervised training on imperfect demonstrations, until it copies numbers
    tiny.py           `build`, `cached` and the command: puts the above into a Hugging Face folder
    cache.py          where built models are kept

It learns from demonstrations named by an import path; it knows no environment, engine or trainer.
"""
