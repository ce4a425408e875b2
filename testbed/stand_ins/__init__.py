"""What stand-ins for experts save and cost: one home on paper, clusters through daemons, and the quality that is left."""
