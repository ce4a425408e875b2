"""`python -m edge_runtime` is `edge-runtime`."""

from edge_runtime.cli import main

main()
