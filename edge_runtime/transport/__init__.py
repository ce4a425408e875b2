"""Messages between processes: sockets (`endpoint`), fan-out calls (`calls`), keys, and the same in memory (`memory`).

`credits` and `heartbeat` are pure. Nothing here knows what a message is for.
"""
