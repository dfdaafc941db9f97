"""The quickstart's model: about a million parameters, built and warm-started on this machine in a minute or two.

recipe.py  all its numbers, its folder in the cache, the demonstrations (named by an import path), and the tokenizer
tiny.py    `build` and the command: the warm start on imperfect demonstrations, and the Hugging Face folder
"""
