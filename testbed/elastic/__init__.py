"""What fewer sub-experts cost and save, and what captured segments take."""
