"""The description of the gateway's HTTP that `GET /openapi.json` serves: kept by hand, and tested against the routes.

::

    document.py   the whole
    agents.py     the calls of agents; their bodies are made of messages.py and sampling.py
    control.py    the calls that start, reward and end sessions
    trainer.py    the calls of a trainer that leases
    about.py      what the gateway says of itself          parts.py      the pieces that all are put together from
"""
