"""Which expert serves a routed slot: wait for the exact one, or use what is at hand and what the budget allows."""
