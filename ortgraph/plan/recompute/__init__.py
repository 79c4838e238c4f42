"""Which results to evaluate again so that a graph fits a memory budget."""
