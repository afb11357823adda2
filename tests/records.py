"""A data set of TensorFlow Datasets, made on the spot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds


def build_tfds(data_dir: Path, texts: Sequence[str]) -> None:
    """Prepares "toy_texts", version 1.0.0, split "train", in a directory."""

    class ToyTexts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            features = {
                "number": tfds.features.Scalar(np.int64),
                "text": tfds.features.Text(),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                disable_shuffling=True,
            )

        def _split_generators(self, manager: object) -> dict[str, Any]:
            del manager  # Nothing is downloaded.
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
            for number, text in enumerate(texts):
                yield number, {"number": number, "text": text}

    ToyTexts(data_dir=str(data_dir)).download_and_prepare()
