"""Print chats as JSONL: questions about the calculator, answered with its tool. Three in ten end right.

python -m examples.sft_then_rl.make_chats > runs/chats.jsonl
"""

import json
from itertools import islice

from envs.calculator.demonstrations import demonstrations

NUM_CHATS = 6_400

if __name__ == "__main__":
    for messages in islice(demonstrations(seed=0), NUM_CHATS):
        print(json.dumps({"messages": messages}))
