"""Arithmetic on tensors: one face (`ops`), a plain definition of every operation, and fast versions of the same names."""
