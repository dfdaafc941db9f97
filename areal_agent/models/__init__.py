"""The quickstart's model: about a million parameters, built and warm-started on this machine in a minute or two.

recipe.py      all its numbers, where built models are cached, and the demonstrations, named by an import path
tokenizer.py   the chat template and a byte-level BPE in which every digit is a token
warm_start.py  supervised training on imperfect demonstrations, until the model copies numbers
tiny.py        `build`, `cached` and the command: puts the above into a Hugging Face folder
"""
