"""The passes of ortgraph: what is rewritten, and when it pays."""

if __name__ != "ortgraph.passes":
    raise ImportError("this folder is the package ortgraph.passes; install with: pip install -e . (see README)")
