"""A worker: masks the blocks of packed rows of 512, as this project and naively.

See rounds.py for how it is talked to, masking.py for what its cases are. It writes the
blocks for the peers' worker: --exchange=DIR gets blocks.npz (tokens int32 [T], offsets
int64 [B + 1], starts_word bool [V]) and vocab.txt.
"""

from common import prepare_process

prepare_process()

import argparse
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import naive
from configs import default
from feeds import SPECIAL, make_feed
from flow import flow
from host import MASKED_STEPS, batch_blocks, masking_rate
from rounds import Case, serve
from spanbert_jax.corpus.store import TOKENIZER
from spanbert_jax.corpus.tokenizers import STARTS, VOCABULARY_FILE
from spanbert_jax.data.batch import Batch, Feed, make_batch, masked_blocks
from spanbert_jax.data.plan import shuffled_rows

# As in host.py, which masks the same.
_ROWS = 256
# Of the batches of a turn.
_STEPS = range(16)


def write_vocabulary(corpus: str, starts_word: np.ndarray, path: Path) -> None:
    """Writes the vocabulary of a corpus, or one that a generated text could have."""
    if corpus:
        path.write_bytes((Path(corpus) / TOKENIZER / VOCABULARY_FILE).read_bytes())
        return
    tokens = [f"w{i}" if starts else f"##w{i}" for i, starts in enumerate(starts_word)]
    for role, token_id in vars(SPECIAL).items():
        tokens[token_id] = f"[{role.upper()}]"
    path.write_text("\n".join(tokens) + "\n")


def real_tokens(made: Iterable[Batch]) -> int:
    """Tokens of some batches, [CLS] and [SEP] among them."""
    return sum(int((batch["segment_ids"] > 0).sum()) for batch in made)


def make_cases(feed: Feed, blocks: list[np.ndarray]) -> dict[str, Case]:
    """The cases by name.

    Args:
        feed: the text and the recipe.
        blocks: the tokens of the blocks that are masked.

    Returns:
        masking: words found, spans drawn, replacements chosen, as host.py times it;
        batch: `make_batch`, from the store to all arrays of a batch; pipeline: that
        through tf.data, with one worker; plain and tight: the two naive maskers.
    """
    amount = sum(map(len, blocks))
    vocabulary = naive.Vocabulary(
        (feed.word_edges & STARTS) != 0,
        feed.special.mask,
        feed.random_tokens.ids.tolist(),
    )

    def masking() -> dict[str, float]:
        return {"amount": amount, "cpu": amount / masking_rate(feed)}

    def batch() -> dict[str, float]:
        made = (
            make_batch(feed, *shuffled_rows(step, _ROWS, feed.plan.num_rows, feed.seed))
            for step in _STEPS
        )
        return {"amount": real_tokens(made)}

    def pipeline() -> dict[str, float]:
        # The graph's tracing counts: batches made before the clock starts would not.
        return {"amount": real_tokens(flow(feed, _ROWS, _STEPS, workers=1))}

    def loop(mask: Callable[..., object], draws: object) -> Case:
        def work() -> dict[str, float]:
            for block in blocks:
                mask(block, vocabulary, draws)
            return {"amount": amount}

        return work

    return {
        "masking": masking,
        "batch": batch,
        "pipeline": pipeline,
        "plain": loop(naive.mask_plainly, np.random.default_rng(0)),
        "tight": loop(naive.mask_tightly, random.Random(0)),
    }


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="", help="default: a generated text")
    parser.add_argument("--exchange", type=Path, required=True)
    arguments = parser.parse_args()
    config = default.get_config()
    config.data.packing = True
    with tempfile.TemporaryDirectory() as cache:
        feed = make_feed(config, arguments.corpus, Path(cache))
        chosen = np.concatenate([batch_blocks(feed, step) for step in MASKED_STEPS])
        read = masked_blocks(feed, chosen, np.zeros_like(chosen))
        starts_word = (feed.word_edges & STARTS) != 0
        np.savez(
            arguments.exchange / "blocks.npz",
            tokens=read.tokens,
            offsets=read.offsets,
            starts_word=starts_word,
        )
        write_vocabulary(
            arguments.corpus, starts_word, arguments.exchange / "vocab.txt"
        )
        blocks = np.split(read.tokens, read.offsets[1:-1])
        description = {"blocks": len(blocks), "tokens": len(read.tokens)}
        serve(description, make_cases(feed, blocks))


if __name__ == "__main__":
    main()
