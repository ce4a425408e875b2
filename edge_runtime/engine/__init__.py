"""The engine: decides step by step which rows of which requests are computed, and carries it out."""
