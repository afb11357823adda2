"""A SpanBERT that trains in minutes on two CPU cores: the demo.

Reproduces: nothing; shows the whole path on the Python reference manual's topics, which
CPython ships (79 documents, about 100,000 tokens to train on).
Expected: held-out MLM loss 0.1 to 0.2 nats below the unigram cross-entropy; so little
text teaches the frequencies of words and little more.
Cost: a minute on two CPU cores.
Command: python -m spanbert_jax.main --config=configs/tiny.py --workdir=runs/demo
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """The default, small and short."""
    config = default.get_config()
    config.data.corpus = "embedded"
    config.data.block_length = 128
    config.data.packing = True
    config.train.steps = 400
    config.train.batch_size = 16
    config.train.log_every = 20
    config.train.eval_every = 100
    config.model.num_layers = 2
    config.model.hidden_size = 128
    config.model.num_heads = 2
    config.model.intermediate_size = 512
    config.model.max_positions = 128
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 50
    config.checkpoint.every = 100
    return config
