"""How a new set of weights travels from the trainer to the engines.

trainer ─ write ─▶ shared_memory.py (a file in memory)  ─ SharedMemoryWeights ─▶ push.py: begin, send, pause, commit,
                   disk.py (a folder with its manifest) ─ DiskWeights ─────────▶          resume engines

push.py imports no torch.
"""
