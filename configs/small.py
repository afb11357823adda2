"""A SpanBERT that leaves the unigram plateau on two CPU cores.

Reproduces: nothing; shows that the objective teaches more than the frequencies of words
from some 7 million tokens of text. Prepare them with --vocab_size=8192.
Cost: one CPU hour (half an hour on two cores).
Command: python -m spanbert_jax.main --config=configs/small.py \
    --config.data.corpus=DIR --workdir=runs/small
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """The default, small, without dropout: each text is seen less than twice."""
    config = default.get_config()
    config.data.block_length = 128
    config.data.packing = True
    config.train.steps = 5_600
    config.train.batch_size = 16
    config.train.log_every = 100
    config.train.eval_every = 700
    config.model.num_layers = 3
    config.model.hidden_size = 192
    config.model.num_heads = 3
    config.model.intermediate_size = 768
    config.model.max_positions = 128
    config.model.dropout = 0.0
    config.model.attention_dropout = 0.0
    config.optimizer.learning_rate = 1.5e-3
    config.optimizer.warmup_steps = 300
    config.optimizer.beta2 = 0.98
    config.checkpoint.every = 700
    return config
