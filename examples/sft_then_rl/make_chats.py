"""Print chats as JSONL: questions about the calculator, answered with its tool. Three in ten end right.

python -m examples.sft_then_rl.make_chats [NUMBER] > runs/chats.jsonl
"""

import json
import sys
from itertools import islice

from envs.calculator.demonstrations import demonstrations
from envs.calculator.workflow import TOOLS

NUM_CHATS = 6_400

if __name__ == "__main__":
    for messages in islice(demonstrations(seed=0), int(sys.argv[1]) if sys.argv[1:] else NUM_CHATS):
        print(json.dumps({"messages": messages, "tools": TOOLS}))
