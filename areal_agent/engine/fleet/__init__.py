"""Several servers as one engine that survives the failure of any of them.

    fleet.py       `Fleet`: the engine, and what holds its parts together
    member.py      one server and what is known of it       call.py      a call at it that can be taken away from it
    roster.py      all servers and their states             routing.py   which of them a request goes to
    membership.py  who joins, who leaves, who keeps them    view.py      what other processes are told of all that
    relay.py       one request, from server to server       partial.py   what it has got so far
    pushes.py      new weights for all of them              due.py       how one is brought to them that missed them
    versions.py    which weights were ever given            same_model.py  whether a server's model is the others'
    keeper.py      watches one, and brings it back          patience.py  how long is waited for what

It knows servers as `member.MemberEngine`, of whichever kind, and starts no process.
"""
