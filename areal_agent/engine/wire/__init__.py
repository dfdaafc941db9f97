"""Our records as the JSON of SGLang's native HTTP API, and back: the subset that client and embedded server share.

    generate.py  `/generate`: a request, its sampling parameters, and its answer in one piece or in events
    control.py   all other calls: pauses, weights, the memory of keys and values, an engine's report about itself
    fields.py    strict reading of JSON; weight versions; failures

Reading is strict in both directions: a field that is missing or of the wrong type raises `WireError` and never becomes
a default. The one exception is `/server_info`, of which SGLang reports less.
"""
