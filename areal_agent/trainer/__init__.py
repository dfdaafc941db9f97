"""The trainer: a process of its own that turns records into optimiser steps and publishes each new set of weights.

main process                             trainer process (python -m areal_agent.trainer)
client.py ◀── framing.py over a socket ──▶ worker.py ─▶ trainer.py ─┬─▶ step.py ─▶ model.py, lora.py, optimizer.py
              records.py: the batch                                 ├─▶ checkpoint.py, state.py
                                                                    └─▶ weights.shared_memory, weights.disk

config.py, client.py, framing.py, records.py and checkpoint.py import no torch: the main process uses them.
"""
