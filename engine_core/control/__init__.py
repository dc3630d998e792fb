"""Decides. Pure Python: nothing here or below imports torch, cupy or zmq, or anything of ours outside this folder."""
