"""Lanes for unlike K compared with none, in replay with a cost model of steps."""
