"""The client of servers that are not ours: SGLang's and vLLM's, which load weights from folders.

    engine.py         `ForeignEngine`: one server as `protocols.Engine`
    server.py         what one kind of server has to say and to do      in_flight.py  the requests of a client
    request.py        one request at a server, from its first byte to its last
    weights.py        what a server serves: pushed, proved, loaded while it is paused, put back where that fails
    adapters.py       folders of adapters, which a server applies to its model
    weight_folders.py weights in shared memory as folders that a server loads      tensors.py  what a folder holds
    served_model.py   what has to be known of the model behind a server, from the model's folder
    unlabelled.py     weights that no trainer has given a server yet
    receiving.py      lets a server's processes take weights from the trainer
    lifeline.py       ends a server with the process that started it; for their launchers
    reception.py      weights on their way into a process of a server; in environments without areal_agent

How one of them is spoken to is known to its own package alone. No torch, but in reception.py.
"""
