"""Proofs that a gateway keeps its word.

protocols.py     the same episodes through every protocol of a running gateway give the same records
templates.py     the chat templates at hand, each with a tokenizer, and the table of what they do with each shape
shapes.py        the conversations that are tried, one a shape, and random ones
playing.py       plays one conversation as the gateway does, and compares its tokens with what transformers renders
"""
