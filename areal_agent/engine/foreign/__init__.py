"""The client of SGLang's and vLLM's servers, which are not ours and load weights from folders.

    engine.py          `ForeignEngine`, the client of one server
    server.py          `ForeignServer`: what a kind of server provides; and the weights that a server serves
    weight_folders.py  weights and adapters as folders that a server loads
    lifeline.py        ends a server with the process that started it; for their launchers
    reception.py       weights on their way into a server's process; runs in environments without areal_agent

sglang/ and vllm/ hold what only one kind of server needs. Only reception.py imports torch.
"""
