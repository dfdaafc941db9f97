"""Several servers as one engine that survives the failure of any of them.

    fleet.py   `Fleet`, the engine, which servers join and leave
    member.py  one server and the calls to it, all servers with their states, and which one a request goes to
    keeper.py  a task for each server that watches it and brings it back after a failure
    relay.py   one request on its way from server to server, and the tokens that it has so far
    pushes.py  new weights for all servers, and for one that has missed them

It works with any kind of server that has a `member.MemberEngine`, and starts no process.
"""
