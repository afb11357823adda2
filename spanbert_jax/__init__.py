"""SpanBERT pretraining in JAX and Flax."""
