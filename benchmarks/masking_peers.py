"""A worker: the collators of transformers, and tokenizers, on the blocks of ours.

Runs in the peers' interpreter. See rounds.py for how it is talked to, masking.py for
what its cases are.
"""

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The peers count as one core does; so does the text that ours reads.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import tokenizers
import torch
import transformers
from transformers import BertTokenizer, DataCollatorForLanguageModeling

from rounds import Case, serve

# A batch of the collators; their cost of a token hardly depends on it.
_ROWS = 32
_LENGTH = 512


def whole_word_example(
    tokens: np.ndarray, starts_word: np.ndarray, tokenizer: BertTokenizer
) -> dict[str, Any]:
    """A block padded to the full length, with the offsets that the collator asks for.

    It pads no offsets itself: its users have the tokenizer pad.
    """
    starts = starts_word[tokens]
    starts[0] = True
    # A character a token, and a space before each word.
    ends = np.cumsum(1 + starts)
    padding = _LENGTH - len(tokens) - 2
    offsets = np.zeros((_LENGTH, 2), np.int64)
    offsets[1 : len(tokens) + 1] = np.stack([ends - 1, ends], axis=1)
    special = [1, *([0] * len(tokens)), *([1] * (padding + 1))]
    return {
        "input_ids": [
            tokenizer.cls_token_id,
            *tokens.tolist(),
            tokenizer.sep_token_id,
            *([tokenizer.pad_token_id] * padding),
        ],
        "attention_mask": [1] * (len(tokens) + 2) + [0] * padding,
        "special_tokens_mask": special,
        "offset_mapping": offsets.tolist(),
    }


def example(tokens: np.ndarray, tokenizer: BertTokenizer) -> dict[str, Any]:
    """A block as the collators' documentation asks for it."""
    return {
        "input_ids": [
            tokenizer.cls_token_id,
            *tokens.tolist(),
            tokenizer.sep_token_id,
        ],
        "special_tokens_mask": [1, *([0] * len(tokens)), 1],
    }


def collate(
    collator: Callable[[list[Any]], Any], examples: list[Any], amount: int
) -> Case:
    """Batches of a list of examples."""

    def work() -> dict[str, float]:
        for begin in range(0, len(examples), _ROWS):
            collator(examples[begin : begin + _ROWS])
        return {"amount": amount}

    return work


def make_cases(
    blocks: list[np.ndarray], starts_word: np.ndarray, tokenizer: BertTokenizer
) -> dict[str, Case]:
    """The cases by name, as masking.py describes them."""
    amount = sum(map(len, blocks))
    subwords = [example(block, tokenizer) for block in blocks]
    words = [whole_word_example(block, starts_word, tokenizer) for block in blocks]
    cases = {}
    for kind in ("np", "pt"):
        # Its warning that whole words are always replaced by [MASK].
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subword = DataCollatorForLanguageModeling(tokenizer, return_tensors=kind)
            word = DataCollatorForLanguageModeling(
                tokenizer, return_tensors=kind, whole_word_mask=True
            )
        cases[f"subword_{kind}"] = collate(subword, subwords, amount)
        cases[f"word_{kind}"] = collate(word, words, amount)
    texts = [tokenizer.decode(block) for block in blocks]
    backend = tokenizer.backend_tokenizer
    encoded = sum(
        len(one.ids)
        for one in backend.encode_batch_fast(texts, add_special_tokens=False)
    )

    def tokenize() -> dict[str, float]:
        backend.encode_batch_fast(texts, add_special_tokens=False)
        return {"amount": encoded}

    return cases | {"tokenizers": tokenize}


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(arguments.exchange / "blocks.npz") as read:
        blocks = np.split(read["tokens"], read["offsets"][1:-1])
        starts_word = read["starts_word"]
    tokenizer = BertTokenizer(
        vocab=str(arguments.exchange / "vocab.txt"), do_lower_case=False
    )
    description = {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
    }
    serve(description, make_cases(blocks, starts_word, tokenizer))


if __name__ == "__main__":
    main()
