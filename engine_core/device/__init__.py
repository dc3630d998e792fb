"""Does. Owns every byte of KV and weights and every copy; runs the plans that `control` makes."""
