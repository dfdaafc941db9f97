"""The trainer: a process of its own that turns records into optimiser steps and publishes each new set of weights.

main process                          trainer process (python -m areal_agent.trainer)
client.py ◀── wire.py over a socket ──▶  worker.py  ─▶ trainer.py ─┬─▶ step.py ─▶ model.py, optimizer.py, metrics.py
                                          │                        │               └─▶ forward.py ─▶ attention.py
                                          │                        ├─▶ checkpoint.py, state.py
                                          └─▶ ranks.py             └─▶ weights/channels.py

vision.py makes of a micro-batch's images what the forward pass takes.
digests.py says what a step was made from and made, so that a replay can be compared with it.
ranks.py starts and joins the other processes of a trainer with several ranks, and context.py shares rows between them.
The main process uses config.py, client.py, wire.py and checkpoint.py, which import no torch.
"""
