"""The description of the gateway's HTTP that `GET /openapi.json` serves: kept by hand, and tested against the routes.

::

    document.py   the whole        agents.py     calls of agents         control.py   calls that start, reward and end
    parts.py      the pieces that all share      about.py     what the gateway says of itself
"""
