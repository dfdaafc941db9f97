"""The trainer's side of a gateway that stands alone: groups under the staleness bound, lease and acknowledgement.

::

    bodies.py   the bodies of /rl/publish, lease, acknowledge, return, drop      routes.py  those endpoints
    bound.py    the staleness bound at the door                                   wire.py    batches as JSON, and back
    lineage.py  whose steps they are              notes.py   what the ledger keeps of trainer and groups
    group.py    the siblings of one task         groups.py  all that are neither leased nor given up
    choice.py   which groups a batch takes
    consumer.py what a trainer does with them: groups before the ledger

A lease lives in the ledger: it survives the death of either side, and is trained once in the lineage that lives.
"""
