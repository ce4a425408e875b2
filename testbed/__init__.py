"""Emulated clusters on one machine: scenarios, workloads, benchmarks and their reports."""
