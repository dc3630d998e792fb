"""Model definitions and checkpoint loading. Knows tensors, not requests."""
