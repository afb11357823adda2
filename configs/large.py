"""SpanBERT-large: the paper's model and recipe.

Reproduces: Joshi et al. 2019 (arXiv:1907.10529): 24 layers, 1,024 hidden units,
336,999,976 parameters with both heads (332,529,664 in the encoder), pretrained on
English Wikipedia and books.
Expected: after fine-tuning, the paper's SQuAD 1.1 F1 94.6, SQuAD 2.0 F1 88.7, OntoNotes
coreference F1 79.6, TACRED F1 70.8, GLUE 82.8; none was measured here.
Cost: the paper's run took 32 V100 GPUs 15 days. A step sees 256 rows of 512, some
100,000 real tokens of a corpus whose blocks average 390: rows are padded, as in the
paper. data.packing=True puts up to 1.5 times the tokens into a step; then 1.6 million
steps see the same text. train.accumulation fits the batch into less memory; what slices
of TPUs take is in docs/scaling.md, and spanbert_jax.dryrun says it of others.
Command: python -m spanbert_jax.main --config=configs/large.py \
    --config.data.corpus=DIR --workdir=runs/large
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """The default at BERT-large's size, in bfloat16."""
    config = default.get_config()
    config.model.num_layers = 24
    config.model.hidden_size = 1024
    config.model.num_heads = 16
    config.model.intermediate_size = 4096
    config.model.dtype = "bfloat16"
    return config
