"""The GPU-owning process: scheduler, KV pool, model execution, and the sockets that serve them."""
