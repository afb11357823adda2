"""Ablation: pairs of segments with next-sentence prediction, span masking, no SBO.

Reproduces: the row "two sequences, span masking, NSP" of the paper's Table 7: BERT's
format with the paper's masks.
Expected: none was measured here; compare with single.py.
Cost: that of configs/base.py less the SBO head; the NSP head costs next to nothing.
Command: python -m spanbert_jax.main --config=configs/ablations/pairs_nsp.py \
    --config.data.corpus=DIR --workdir=runs/pairs_nsp
"""

from ml_collections import ConfigDict

from configs.ablations import single


def get_config() -> ConfigDict:
    """Span masking on pairs, with NSP."""
    config = single.get_config()
    config.data.pairs = True
    return config
