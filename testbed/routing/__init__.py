"""Routers compared: replays of recorded and drawn traces, runs through daemons, and what a decision costs."""
