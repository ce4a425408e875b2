"""The key/value cache: which blocks hold which tokens, and the memory behind them."""
