"""Which worker a request goes to: prefill by its first bytes, decode by the experts that its prompt used."""
