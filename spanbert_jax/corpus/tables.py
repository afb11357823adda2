"""Texts that a library keeps in records: Parquet's row groups, TFDS's examples."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanbert_jax.corpus.files import File, Naming
from spanbert_jax.errors import InputError

# Enough for the library's own cost per batch not to count.
_BATCH_ROWS = 256
_TFDS_NAME = re.compile(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?")


@dataclass(frozen=True)
class Split:
    """A split of a data set of TensorFlow Datasets that is on disk.

    Attributes:
        name: such as "wikipedia/20230601.en/train".
        location: with the version: "wikipedia/20230601.en:1.0.0/train".
        size: bytes of its files.
        stamp: its version and its number of examples.
    """

    name: str
    location: str
    size: int
    stamp: str


def find_split(name: str, split: str, data_dir: str | None) -> Split:
    """Finds what was prepared earlier; downloads nothing.

    Args:
        name: NAME, NAME/CONFIG, and either with :VERSION.
        split: a split's name, not a part or a sum of them.
        data_dir: where TFDS keeps its data; None for its own default.

    Raises:
        InputError: it is not there.
    """
    if not _TFDS_NAME.fullmatch(name):
        raise InputError(
            f"--input=tfds:{name} is not of the form tfds:NAME[/CONFIG][:VERSION]"
        )
    builder = _builder(name, data_dir)
    if split not in builder.info.splits:
        raise InputError(
            f"--tfds_split={split} is no split of tfds:{name}; there are"
            f" {', '.join(builder.info.splits) or 'none'}"
        )
    full_name = builder.info.full_name.removesuffix(f"/{builder.version}")
    info = builder.info.splits[split]
    return Split(
        name=f"{full_name}/{split}",
        location=f"{full_name}:{builder.version}/{split}",
        size=int(info.num_bytes),
        stamp=f"{builder.version}-{info.num_examples}",
    )


def count_examples(location: str, text_field: str, data_dir: str | None) -> int:
    """Returns the number of examples of a `Split.location`.

    Raises:
        InputError: it is not there, or has no such feature of texts.
    """
    name, _, split = location.rpartition("/")
    info = _builder(name, data_dir).info
    _text_feature(location, info.features, text_field)
    return info.splits[split].num_examples


def read_examples(
    location: str, start: int, stop: int, text_field: str, data_dir: str | None
) -> Iterator[bytes]:
    """Yields the texts of the examples numbered [start, stop), in the order on disk.

    Args:
        location: of a `Split`.
        start: the first example.
        stop: the one after the last.
        text_field: the feature that holds the text.
        data_dir: where TFDS keeps its data; None for its own default.

    Raises:
        InputError: there is no such feature, or the data cannot be read.
    """
    if start == stop:
        return
    import tensorflow as tf
    import tensorflow_datasets as tfds

    # Where the full wheel is installed it would take the accelerator's memory.
    tf.config.set_visible_devices([], "GPU")
    name, _, split = location.rpartition("/")
    builder = _builder(name, data_dir)
    feature = _text_feature(location, builder.info.features, text_field)
    with Naming(f"tfds:{location}"):
        examples = builder.as_dataset(
            split=f"{split}[{start}:{stop}]",
            shuffle_files=False,
            # One file after the other; any other number would mix their examples.
            read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
            decoders=tfds.decode.PartialDecoding({text_field: feature}),
        ).as_numpy_iterator()
    while True:
        with Naming(f"tfds:{location}"):
            example = next(examples, None)
        if example is None:
            return
        yield example[text_field]


def row_group_sizes(location: str, text_field: str) -> list[int]:
    """Returns the bytes, uncompressed, of a Parquet file's row groups.

    Raises:
        InputError: it is no Parquet file, or has no such column of texts.
    """
    with File(location, unpack=False) as file, _parquet(file, location) as table:
        _check_column(location, table.schema_arrow, text_field)
        groups = table.metadata
        return [
            groups.row_group(number).total_byte_size
            for number in range(groups.num_row_groups)
        ]


def read_rows(
    location: str, start: int, stop: int, text_field: str
) -> Iterator[bytes | None]:
    """Yields the texts of the row groups [start, stop) of a Parquet file; None is null.

    Args:
        location: a path or a URL.
        start: the first row group.
        stop: the one after the last.
        text_field: the column that holds the text.

    Raises:
        InputError: it is no Parquet file, has no such column, or cannot be read.
    """
    import pyarrow

    with File(location, unpack=False) as file, _parquet(file, location) as table:
        _check_column(location, table.schema_arrow, text_field)
        # Other processes read at the same time: no threads.
        batches = table.iter_batches(
            _BATCH_ROWS,
            row_groups=range(start, stop),
            columns=[text_field],
            use_threads=False,
        )
        while True:
            with Naming(location):
                batch = next(batches, None)
                if batch is None:
                    return
                # As bytes: Arrow does not make sure that a string is UTF-8.
                texts = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
            yield from texts


def _parquet(file: File, location: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"--input={location} needs a package that is not installed: pip install"
            " pyarrow"
        ) from error
    with Naming(location):
        return parquet.ParquetFile(file.raw)


def _check_column(location: str, schema: Any, text_field: str) -> None:
    from pyarrow import types

    if schema.names.count(text_field) != 1:
        raise InputError(
            f"{location}: no column --text_field={text_field}; there are"
            f" {', '.join(schema.names) or 'none'}"
        )
    kind = schema.field(text_field).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    tests = (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view),
        types.is_null,
    )
    if not any(test(value) for test in tests):
        raise InputError(
            f"{location}: --text_field={text_field} holds {kind}, not a text"
        )


def _text_feature(location: str, features: Any, text_field: str) -> Any:
    if text_field not in features:
        raise InputError(
            f"tfds:{location}: no feature --text_field={text_field}; there are"
            f" {', '.join(features) or 'none'}"
        )
    feature = features[text_field]
    if feature.shape != () or feature.np_dtype != np.dtype(object):
        raise InputError(
            f"tfds:{location}: --text_field={text_field} holds {feature}, not a text"
        )
    return feature


def _builder(name: str, data_dir: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise InputError(
            f"--input=tfds:{name} needs a package that is not installed: pip install"
            " tensorflow-datasets"
        ) from error
    directory = data_dir and os.path.expanduser(data_dir)
    where = f"--data_dir={directory or tfds.core.constants.DATA_DIR}"
    try:
        builder = tfds.builder(name, data_dir=directory)
    # A data set is code of others, which may raise anything when it is made.
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"--input=tfds:{name} is not in {where}: {reason}") from error
    if not builder.is_prepared():
        argument = f", data_dir={directory!r}" if directory else ""
        raise InputError(
            f"--input=tfds:{name} is not prepared in {where}, and a build downloads"
            ' nothing; prepare it first: python -c "import tensorflow_datasets as tfds;'
            f" tfds.builder('{name}'{argument}).download_and_prepare()\""
        )
    return builder
