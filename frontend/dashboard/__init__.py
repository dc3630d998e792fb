"""The live page of a frontend at /dashboard: what its engines publish, shown in a browser."""
