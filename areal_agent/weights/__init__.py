"""How a new set of weights travels from the trainer to the engines.

trainer ─ write ─▶ shared_memory.py (a file in memory) ─ SharedMemoryWeights ─▶ push.py: pause, update, resume engines

push.py imports no torch; on disk, a checkpoint folder is a set of weights already (types.DiskWeights).
"""
