"""Proofs that agents get what they are promised: by the command line, `__main__.py`.

protocols.py     the same episodes through every protocol of a running gateway give the same records
shapes.py        the conversations that are tried on chat templates: one a shape, and random ones
templates.py     the templates at hand, each with a tokenizer
playing.py       plays a conversation on a template as the gateway does, and compares prompts with transformers'
table.py         tries all shapes and prints what was found
"""
