"""The model: what it is, how it is read from disk, and how its layers are run. Knows no cluster, clock or request.

One set of letters for the whole repository:

T  tokens (rows) in a step                     P  width of one attention head
K  routed columns per token (experts, or       L  layers
   sub-experts at a tier)                      V  vocabulary
E  experts in a layer                          B  requests in a step
R  routed rows, one per (token, expert) pair   M  blocks in a request's block table
D  model width                                 S  positions in the rope table
F  inner width of an expert                    N  nodes
H  query heads                                 C  centroids
G  key/value heads

Inside `kernels` N also names the outputs of a linear weight, as [N, K] is the usual name of its shape.
"""
