"""How a new set of weights travels from the trainer to the engines.

trainer ─▶ a channel (channels.py) ─ a form of `types.Weights` ─▶ engines

channels.py holds the ways to copy weights out of the trainer. push.py makes engines switch to them (begin, send, pause,
commit, resume) and decides whether answers in progress are interrupted or finished first; it imports no torch.
"""
