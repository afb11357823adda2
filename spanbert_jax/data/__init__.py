"""From a corpus directory to NumPy batches, on the host. Never imports jax."""
