"""Benchmarks. Each writes one JSON file and one PNG plot, with the machine described."""
