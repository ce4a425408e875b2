"""Other engines on the same weights and the same work, each in a process of its own. All are optional."""
