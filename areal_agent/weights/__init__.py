"""How a new set of weights travels from the trainer to the engines.

trainer ─ write ─▶ shared_memory.py (a file in memory)  ─ SharedMemoryWeights ─▶ push.py: begin, send, pause, commit,
                   disk.py (a folder with its manifest) ─ DiskWeights ─────────▶          resume engines
                   distributed.py (a store to ask at) ─ DistributedWeights ────▶

policies.py says when: in mid-answer, between turns, or between rollouts. Neither it nor push.py imports torch.
"""
