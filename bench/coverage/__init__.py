"""Model families with proven gradients: what trains, and the proof. ``python -m bench.coverage`` runs it."""
