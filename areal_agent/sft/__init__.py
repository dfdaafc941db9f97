"""Supervised fine-tuning on chats, or on the best rollouts of a run: `python -m areal_agent.sft --config FILE`.

config.py       what a fine-tuning is asked for
data.py         the rows of JSONL files, or the rollouts of a ledger, as sequences: checked, dealt and held out
  sequences.py  a chat as the chat template writes it, with the assistant's tokens in the loss
fitting.py      the loop: a step, an evaluation, the end when the loss is flat. The tiny model's warm start is one
run.py          a fine-tuning in its run folder: checkpoints, metrics, picture, the exported model

The trainer (areal_agent/trainer) is in the same process: packing, ranks, adapters and checkpoints are its own.
"""
