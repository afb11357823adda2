"""The toy of the tests: a generated text, a small corpus and a small config."""

import random
from pathlib import Path

from ml_collections import ConfigDict

from configs import default
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.store import Corpus


def make_text(seed: int = 0, documents: int = 120) -> str:
    """Documents of 1 to 12 lines over an invented vocabulary with a Zipf law."""
    generator = random.Random(seed)
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ["".join(generator.choices(syllables, k=1 + i % 4)) for i in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    texts = []
    for _ in range(documents):
        lines = []
        for _ in range(generator.randint(1, 12)):
            sentence = generator.choices(words, weights, k=generator.randint(3, 15))
            lines.append(" ".join(sentence).capitalize() + " .")
        texts.append("\n".join(lines))
    return "\n\n".join(texts) + "\n"


def build_corpus(directory: Path, text: str | None = None) -> Corpus:
    """Builds the corpus of a text, by default `make_text()`, in a new directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    source = directory.with_suffix(".txt")
    source.write_text(make_text() if text is None else text)
    return build(
        BuildOptions(
            output=directory,
            input=(str(source),),
            vocab_size=300,
            valid_fraction=0.1,
            runner=Local(1),
        )
    )


def make_config(cache: Path) -> ConfigDict:
    """Two layers of width 64, blocks of 32 tokens, batches of 8 rows, 20 steps."""
    config = default.get_config()
    config.data.cache = str(cache)
    config.data.block_length = 32
    config.data.packing = True
    config.train.steps = 20
    config.train.batch_size = 8
    config.train.log_every = 1
    config.train.eval_every = 0
    config.model.num_layers = 2
    config.model.hidden_size = 64
    config.model.num_heads = 2
    config.model.intermediate_size = 128
    config.model.max_positions = 32
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 5
    config.checkpoint.every = 10
    return config


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
