"""The HTTP face of Coldblock: tokenizes, applies templates, streams. Never imports torch or the engine."""
