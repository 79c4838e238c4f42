"""Running training graphs: TrainingSession, the bound arena, runtime detection."""
