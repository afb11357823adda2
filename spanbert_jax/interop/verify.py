"""The verification: whether an export computes in PyTorch what the model does here."""

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spanbert_jax import settings
from spanbert_jax.corpus.store import Split
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.interop.boundary_head import CLASS
from spanbert_jax.interop.card import CARD, python_blocks
from spanbert_jax.interop.pretrained import SBO_WEIGHTS, portable_model
from spanbert_jax.model.heads import Sbo
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training.saved import Saved

# float32 alone makes differences of some 1e-5.
TOLERANCE = 1e-4

_LIBRARIES = ("torch", "transformers")
# Texts to compare, at least and at most, and how many of them make a batch.
_FEWEST, _MOST, _ROWS = 50, 64, 4
# Batches are padded to a multiple of so many places, so that few shapes are compiled.
_PLACES = 128
# Tokens of the pieces that held-out documents are cut into, one after the other.
_SIZES = (3, 9, 27, 81, 243, 729)
_MOST_MASKS = 10

_SENTENCES = (
    "The old bridge was closed in 1962, and nobody crossed it for years.",
    "Water boils at 100 degrees!",
    'She asked, "Who has read the third chapter?"',
    "Prices rose by 3.5 % in spring; wages did not.",
    "It rained.",
    "The committee, which met twice a month, could not agree on a date.",
    "Naïve readers may think that the café's owner - Zoë - had planned it all.",
    "Run the program again (it takes a minute) and compare both files.",
    "On Monday the team won the game in Denver and flew home.",
    "Proteins fold into shapes that decide what they do.",
    "He paid $20.50 for it, or was it €20?",
)

# What is compared, and the key of a batch that is not 0 where it counts.
_HIDDEN, _MLM, _SBO, _NSP = (
    "hidden states",
    "MLM logits",
    "SBO logits",
    "next-sentence logits",
)
_WHERE = {
    _HIDDEN: "segment_ids",
    _MLM: "segment_ids",
    _SBO: "sbo_weights",
    _NSP: "nsp_weights",
}
_KEYS = (
    *("token_ids", "segment_ids", "position_ids", "type_ids", "target_positions"),
    *("left_positions", "right_positions", "span_offsets"),
)

# Largest differences by what was compared.
Differences = dict[str, float]
# Arrays by what they are, [R, L, ...] or, of a text as a whole, [R, 1, ...].
Outputs = dict[str, np.ndarray]
Batch = dict[str, np.ndarray]


class Texts(NamedTuple):
    """What to compare on.

    Attributes:
        texts: at least 50, of unequal lengths.
        origin: what they are, for people to read.
    """

    texts: list[str]
    origin: str


class Verdict(NamedTuple):
    """How an export compares.

    Attributes:
        tokens: places that were compared.
        misread: texts to which the tokenizers give unequal ids.
        differences: the largest ones.
    """

    tokens: int
    misread: list[str]
    differences: Differences

    @property
    def is_good(self) -> bool:
        """Whether the export is as it should be."""
        # A NaN is below nothing.
        return not self.misread and all(
            difference <= TOLERANCE for difference in self.differences.values()
        )


def check_libraries() -> None:
    """Looks for what a verification needs.

    Raises:
        InputError: a library is missing.
    """
    missing = [name for name in _LIBRARIES if not importlib.util.find_spec(name)]
    if missing:
        raise InputError(
            f"--verify needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def verify(saved: Saved, directory: Path) -> bool:
    """Says how an export compares with its model.

    Args:
        saved: the model.
        directory: its export.

    Returns:
        Whether the export is as it should be; if not, an error was told.
    """
    texts, origin = find_texts(saved)
    print(f"comparing with transformers on {origin}", flush=True)
    verdict = compare(saved, directory, texts)
    shown = ", ".join(f"{name} {x:.1e}" for name, x in verdict.differences.items())
    print(f"largest differences over {verdict.tokens:,} tokens: {shown}", flush=True)
    if verdict.is_good:
        return True
    fault = f"a difference of more than {TOLERANCE:g}"
    if verdict.misread:
        count = len(verdict.misread)
        fault = f"other ids for {count} of {len(texts)} texts, {verdict.misread[0]!r}"
    print(f"error: {directory} is not the model of the run: {fault}", file=sys.stderr)
    return False


def find_texts(saved: Saved) -> Texts:
    """Held-out text of the run if its corpus is there, else sentences of our own."""
    try:
        corpora = settings.open_corpora(saved.config)
    except (InputError, StorageError) as error:
        return Texts(_own_texts(_MOST), f"{_MOST} texts of this program ({error})")
    if corpora.fingerprint != saved.record["corpus"]:
        reason = f"the run had another data.corpus={saved.config.data.corpus}"
        return Texts(_own_texts(_MOST), f"{_MOST} texts of this program ({reason})")
    limit = saved.config.model.max_positions - 2
    share = -(-_MOST // len(corpora.corpora))
    texts = [
        _spell(corpora.tokenizer, ids)
        for corpus in corpora.corpora
        for ids in itertools.islice(_pieces(corpus.split("valid"), limit), share)
    ]
    origin = f"{len(texts)} held-out texts of {', '.join(corpora.names)}"
    if len(texts) < _FEWEST:
        own = _own_texts(_MOST - len(texts))
        origin = f"{origin} and {len(own)} of this program"
        texts += own
    return Texts(texts, origin)


def _own_texts(count: int) -> list[str]:
    """Texts of one sentence, of two, and so on."""
    ranges = itertools.combinations(range(len(_SENTENCES) + 1), 2)
    return [
        " ".join(_SENTENCES[begin:end])
        for begin, end in itertools.islice(ranges, count)
    ]


def _pieces(split: Split, limit: int) -> Iterator[np.ndarray]:
    """Cuts documents into pieces of unequal lengths."""
    sizes = itertools.cycle([min(size, limit) for size in _SIZES])
    for shard in split.shards:
        for begin, end in itertools.pairwise(shard.documents.tolist()):
            while begin < end:
                stop = min(begin + next(sizes), end)
                yield shard.tokens[begin:stop]
                begin = stop


def _spell(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    spelt = map(tokenizer.spell, ids.tolist())
    return "".join(f" {text}" if is_apart else text for text, is_apart in spelt)


def compare(saved: Saved, directory: Path, texts: Sequence[str]) -> Verdict:
    """Runs a model here and, from its export, in transformers.

    Each text goes through both tokenizers; then a span of it is masked, and padded
    batches go through both models, in float32. Padding is not compared.

    Args:
        saved: the model.
        directory: its export.
        texts: what to read.

    Returns:
        What differs.
    """
    tokenizer = saved.origin.tokenizer
    limit = saved.config.model.max_positions
    rows = [
        [tokenizer.cls_id, *ids[: limit - 2], tokenizer.sep_id]
        for ids in tokenizer.encode(texts)
    ]
    model = portable_model(saved.config, tokenizer.vocab_size)
    with _quiet():
        read = _load_tokenizer(directory, limit)
        misread = [t for t, row in zip(texts, rows, strict=True) if read(t) != row]
        their_outputs = _load_model(directory, model.sbo)
    our_outputs = _prepare_model(model, saved.params)
    # By length, so that padding is little; a text without a token has none to mask.
    rows = sorted((row for row in rows if len(row) > 2), key=len)
    differences: Differences = {}
    for begin in range(0, len(rows), _ROWS):
        batch = _make_batch(rows[begin : begin + _ROWS], begin, model, tokenizer, limit)
        ours, theirs = our_outputs(batch), their_outputs(batch)
        for name in ours:
            found = _largest(ours[name], theirs[name], batch[_WHERE[name]])
            differences[name] = np.maximum(differences.get(name, 0.0), found)
    ordered = {name: differences[name] for name in _WHERE if name in differences}
    return Verdict(sum(map(len, rows)), misread, ordered)


def _make_batch(
    rows: Sequence[Sequence[int]],
    number: int,
    model: SpanBert,
    tokenizer: Tokenizer,
    limit: int,
) -> Batch:
    """Pads texts to a batch whose target slots are all places, one masked span a text.

    Args:
        rows: ids with [CLS] and [SEP], and at least one between.
        number: of the first of the texts; the lengths of the spans follow from it.
        model: whose batch.
        tokenizer: whose ids.
        limit: most places of a row.

    Returns:
        The batch; see `spanbert_jax.data.batch`.
    """
    longest = max(map(len, rows))
    shape = (len(rows), min(-(-longest // _PLACES) * _PLACES, limit))
    batch = {key: np.zeros(shape, np.int32) for key in _KEYS}
    batch["token_ids"][:] = tokenizer.pad_id
    batch["position_ids"][:] = batch["target_positions"][:] = np.arange(shape[1])
    for i, row in enumerate(rows):
        count = min(1 + (number + i) % _MOST_MASKS, len(row) - 2)
        first = 1 + (len(row) - 2 - count) // 2
        span = np.s_[i, first : first + count]
        batch["token_ids"][i, : len(row)] = row
        batch["token_ids"][span] = tokenizer.mask_id
        batch["segment_ids"][i, : len(row)] = 1
        if model.geometry.type_vocab_size > 1:
            batch["type_ids"][i, len(row) // 2 : len(row)] = 1
        batch["left_positions"][span] = first - 1
        batch["right_positions"][span] = first + count
        batch["span_offsets"][span] = np.arange(1, count + 1)
    if model.sbo:
        offsets = batch["span_offsets"]
        batch["sbo_weights"] = (offsets > 0) & (offsets <= model.sbo.positions)
    batch["nsp_positions"] = np.zeros((len(rows), 1), np.int32)
    batch["nsp_weights"] = np.ones((len(rows), 1), bool)
    return batch


def _prepare_model(
    model: SpanBert, params: dict[str, Any]
) -> Callable[[Batch], Outputs]:
    """What our model computes of a batch."""
    params = jax.device_put(params)

    @jax.jit
    def compute(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        variables = {"params": params}
        hidden = model.apply(variables, batch, deterministic=True, method="encode")
        logits = model.apply(variables, hidden, batch, method="predict")
        size = model.geometry.vocab_size
        outputs = {_HIDDEN: hidden, _MLM: logits.mlm[..., :size]}
        if model.sbo:
            outputs[_SBO] = logits.sbo[..., :size]
        if model.nsp:
            outputs[_NSP] = logits.nsp
        return outputs

    def outputs(batch: Batch) -> Outputs:
        # TPUs and GPUs would round the factors of a product.
        with jax.default_matmul_precision("highest"):
            return jax.device_get(compute(params, batch))

    return outputs


def _load_tokenizer(directory: Path, limit: int) -> Callable[[str], list[int]]:
    """What the tokenizer of an export makes of a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def read(text: str) -> list[int]:
        # A "[MASK]" in a text of the corpus was never the token.
        encoded = tokenizer(
            text, truncation=True, max_length=limit, split_special_tokens=True
        )
        return encoded["input_ids"]

    return read


def _load_model(directory: Path, form: Sbo | None) -> Callable[[Batch], Outputs]:
    """What the model of an export computes of a batch, and the module of its card."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(directory, local_files_only=True).eval()
    head = _load_head(directory) if form else None

    def boundary_logits(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        inward = int(form.internal)
        places = {
            "left": batch["left_positions"] + inward,
            "right": batch["right_positions"] - inward,
        }
        rows = np.arange(len(hidden))[:, None]
        states = [hidden[rows, places[side]] for side in form.sides]
        place = np.clip(batch["span_offsets"] - 1, 0, form.positions - 1)
        table = model.get_input_embeddings().weight
        return head(*states, torch.from_numpy(place), table)

    def outputs(batch: Batch) -> Outputs:
        with torch.inference_mode():
            found = model(
                input_ids=torch.from_numpy(batch["token_ids"]).long(),
                attention_mask=torch.from_numpy(batch["segment_ids"]).long(),
                token_type_ids=torch.from_numpy(batch["type_ids"]).long(),
                output_hidden_states=True,
            )
            hidden = found.hidden_states[-1]
            tensors = {_HIDDEN: hidden}
            if "seq_relationship_logits" in found:
                tensors[_MLM] = found.prediction_logits
                tensors[_NSP] = found.seq_relationship_logits[:, None]
            else:
                tensors[_MLM] = found.logits
            if form:
                tensors[_SBO] = boundary_logits(hidden, batch)
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    return outputs


def _load_head(directory: Path) -> Any:
    """The span boundary head, by the very code that the card shows."""
    from safetensors.torch import load_file

    path = directory / CARD
    blocks = python_blocks(path.read_text())
    [code] = [block for block in blocks if f"class {CLASS}(" in block]
    namespace: dict[str, Any] = {}
    exec(compile(code, path, "exec"), namespace)
    head = namespace[CLASS]().eval()
    head.load_state_dict(load_file(directory / SBO_WEIGHTS))
    return head


def _largest(ours: np.ndarray, theirs: np.ndarray, counts: np.ndarray) -> float:
    """The largest difference at the places that count; NaN if there is a NaN."""
    counts = counts.astype(bool)
    return float(np.abs(ours[counts] - theirs[counts]).max(initial=0.0))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from talking, for a while."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    shows_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
