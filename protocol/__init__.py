"""What crosses the process boundary between frontends and the engine, and nothing else."""
