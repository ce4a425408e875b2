"""Membership, placement epochs, routing and token streams. Never touches an activation."""
