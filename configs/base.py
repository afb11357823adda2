"""SpanBERT-base: BERT-base's size, the paper's recipe.

Reproduces: the recipe of Joshi et al. 2019 (arXiv:1907.10529) at 12 layers and 768
hidden units, some 110 million parameters.
Expected: after fine-tuning, what its authors state of the model of this size that they
released: SQuAD 1.1 F1 92.4 and SQuAD 2.0 F1 83.6 (development sets), OntoNotes
coreference F1 77.4, TACRED F1 68.2; none was measured here.
Cost: about a third of large's. A step sees 256 rows of 512, some 100,000 real tokens of
a corpus whose blocks average 390: rows are padded, as in the paper. data.packing=True
puts up to 1.5 times the tokens into a step; then 1.6 million steps see the same text.
Command: python -m spanbert_jax.main --config=configs/base.py \
    --config.data.corpus=DIR --workdir=runs/base
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    """The default in bfloat16: what an accelerator computes fastest."""
    config = default.get_config()
    config.model.dtype = "bfloat16"
    return config
