"""How a model's files reach the processes that need them: the own folder, a cache, peers, the hub."""
