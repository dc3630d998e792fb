"""Benchmarks. Each writes one JSON file and one HTML page, with the machine described."""
