"""``python -m ortgraph`` is the ``ortgraph`` command."""

from ortgraph.cli import main

main()
