"""Elastic compute: sub-experts, tiers K, and the choice of what runs and what is left out."""
