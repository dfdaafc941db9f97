"""What the clients of servers that are not ours have in common: SGLang's and vLLM's, which load weights from folders.

    request.py        one request at a server, from its first byte to its last
    weights.py        what a server serves: pushed, proved, loaded while it is paused, put back where that fails
    adapters.py       folders of adapters, which a server applies to its model
    weight_folders.py weights in shared memory as folders that a server loads      tensors.py  what a folder holds
    served_model.py   what has to be known of the model behind a server, from the model's folder
    lifeline.py       ends a server with the process that started it; for their launchers

How one of them is spoken to is known to its own package alone. No torch.
"""
