"""Measures a model or a machine and writes artifacts that the runtime reads. The runtime never imports it."""
