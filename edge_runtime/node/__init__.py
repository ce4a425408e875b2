"""One machine's daemon: its share of the model, its engine, its expert service. Knows the coordinator only as a peer."""
