"""A turn from its place among the others to its record: what is asked, sampled, read, written down and delivered.

::

    order.py         what is asked of the answers      question.py      what an endpoint must tell of a request
    exchange.py      one request: one turn, or one for each of its prompts
       │
    pending_turn.py  a turn in the making              truncated_turn.py   one for which there is no room
       ├─▶ calls.py      the engine requests in flight
       ├─▶ draft.py      an answer while it is sampled: stop.py finds its end, reading.py reads it
       ├─▶ outlet.py     what it gains, on its way out
       └─▶ turn_log.py   the forest and the journal; what is recorded is a packed_turn.py
    choice.py        an answer, whole                  answer.py        all that a request gave
    deliveries.py    which answers reached their agent

It knows nothing of HTTP and of the JSON of an endpoint.
"""
