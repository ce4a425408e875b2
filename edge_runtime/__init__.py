"""The runtime: everything that serves a request, from the wire to the weights."""

__version__ = "0.1.0"
