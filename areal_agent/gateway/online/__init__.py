"""The trainer's side of a stand-alone gateway: groups under the staleness bound, leases and acknowledgements.

::

    consumer.py  the gateway's journal and the handlers of /rl/publish, lease, acknowledge, return, drop and status;
                 whose train steps count
    groups.py    groups of sibling sessions until they are leased or dropped; the staleness bound at admission
    wire.py      the bodies of those calls, and leased batches as JSON

Leases are in the ledger, so they survive a crash of either side. Each is trained once in the surviving lineage.
"""
