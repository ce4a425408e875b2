"""Messages between processes: `endpoint` over sockets, `memory` within one process, both as `interface` says.

`calls` is the token path's fan-out, `keys` says who may connect, `credits` and `heartbeat` are pure. Nothing here knows
what a message is for.
"""
