"""Our tokenizers as the files of one that `transformers` loads.

The ids are those of `Tokenizer.encode`, for any text, but for this:

- A special token that stands in a text is that token, as users of `transformers` expect
  of "[MASK]". With `split_special_tokens=True` it is text, as for us, unless it is a
  word, such as "mask", for WordPiece, or for SentencePiece a single character, or one
  of unknown characters only. One that a SentencePiece model holds for text is spelt
  out, where we have the unknown token.
- For a corpus that is read in NFC or NFKC, the files bring a text into that form first.
- Of two spellings that are equally good to a unigram model, up to the rounding of the
  library's sums of 32 bits, either may be taken: in the worst model seen, for 140 words
  of 30 MB of text.
- `transformers` refuses a lone surrogate, for which we have a question mark.
- Lines of more than 100,000 characters, which we encode in parts, are encoded whole.
- Marks that are newer than the tables of `tokenizers`, those of Unicode 9, may stand in
  another order where a normal form is asked for. SentencePiece loses them at the start
  of a line whose accents are stripped.
- SentencePiece loses U+FFF0 and U+FFF1, which are no characters. Where a model keeps
  the spaces, or the "▁", that a line begins with, there is one less.
"""

import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Encoder

from spanbert_jax.corpus import store
from spanbert_jax.corpus.sentencepiece import SentencePiece
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.interop.charsmap import charsmap_normalizers
from spanbert_jax.interop.sentencepiece_model import (
    Algorithm,
    Kind,
    Model,
    Piece,
    read_model,
)

FAST = "tokenizer.json"
CONFIG = "tokenizer_config.json"

_SPACE = "▁"
_FORMS = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}
# A word of more characters is unknown: for BERT, for us, and for `BertTokenizer`.
_LONGEST_WORD = 100
# The library's score of such a piece, whatever the model says.
_USER_DEFINED = -0.1
# How far an unknown character is below the least score of all, in both libraries.
_UNKNOWN = 10


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes what `AutoTokenizer.from_pretrained(directory)` reads.

    That is tokenizer.json, tokenizer_config.json and the file of `Tokenizer.save`.
    Equal tokenizers give equal bytes.

    Args:
        tokenizer: the tokenizer.
        directory: where to; it exists.
        max_length: the most tokens that the model takes, [CLS] and [SEP] among them.

    Raises:
        InputError: as `fast_tokenizer`.
        StorageError: a file cannot be written.
    """
    fast = fast_tokenizer(tokenizer)
    try:
        tokenizer.save(directory)
        content = fast.to_str(pretty=True) + "\n"
        (directory / FAST).write_text(content, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write to {directory}: {error}") from error
    store.write_json(directory / CONFIG, _describe(tokenizer, max_length))


def fast_tokenizer(tokenizer: Tokenizer) -> Encoder:
    """Returns a tokenizer of the `tokenizers` library that gives the same ids.

    Raises:
        InputError: it is a SentencePiece model of a sort that the library has not.
    """
    if isinstance(tokenizer, SentencePiece):
        fast = _sentencepiece(tokenizer)
    else:
        fast = _wordpiece(tokenizer)
    specials = tokenizer.specials
    fast.add_special_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                # Where a mask is put for "▁the", it has the place of the space, too.
                lstrip=token == specials.mask and tokenizer.kind == "sentencepiece",
            )
            for token in astuple(specials)
        ]
    )
    fast.post_processor = processors.BertProcessing(
        (specials.sep, tokenizer.sep_id), (specials.cls, tokenizer.cls_id)
    )
    return fast


def _describe(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    normalisation = tokenizer.normalisation
    # `BertTokenizer` makes its normaliser anew, from this file, without a normal form.
    is_bert = tokenizer.kind == "wordpiece" and normalisation.unicode == "none"
    return {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "do_lower_case": normalisation.lowercase,
        "strip_accents": normalisation.strip_accents,
        "tokenize_chinese_chars": tokenizer.kind == "wordpiece",
        # Of what is decoded: BERT's pieces say little of the spaces between words.
        "clean_up_tokenization_spaces": tokenizer.kind == "wordpiece",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": max_length,
        **{f"{role}_token": token for role, token in vars(tokenizer.specials).items()},
    }


def _wordpiece(tokenizer: Tokenizer) -> Encoder:
    vocabulary = {token: i for i, token in enumerate(tokenizer.tokens)}
    fast = Encoder(
        models.WordPiece(
            vocabulary,
            unk_token=tokenizer.specials.unk,
            max_input_chars_per_word=_LONGEST_WORD,
        )
    )
    normalisation = tokenizer.normalisation
    fast.normalizer = normalizers.Sequence(
        [*_FORMS[normalisation.unicode], normalisation.normalizer(clean=True)]
    )
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    return fast


def _sentencepiece(tokenizer: SentencePiece) -> Encoder:
    model = read_model(tokenizer.model)
    if model.spaces_behind:
        raise InputError(
            "the SentencePiece model spells a space with the word before it (it was"
            " learnt with treat_whitespace_as_suffix=true), which the tokenizers of"
            " Hugging Face cannot"
        )
    if model.algorithm == Algorithm.UNIGRAM:
        fast = Encoder(_unigram(model, tokenizer))
    elif model.algorithm == Algorithm.BPE:
        fast = Encoder(_bpe(model, tokenizer))
    else:
        raise InputError(
            f"the SentencePiece model is of type {model.algorithm.name.lower()}; the"
            " tokenizers of Hugging Face have unigram and bpe only"
        )
    fast.normalizer = normalizers.Sequence(
        [
            *_FORMS[tokenizer.normalisation.unicode],
            *_fold(tokenizer),
            *_rule(model),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    # "first": not behind a special token, where a word may go on.
    fast.pre_tokenizer = pre_tokenizers.Metaspace(
        _SPACE, prepend_scheme="first", split=False
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", left=1, right=0),
        ]
    )
    return fast


def _fold(tokenizer: SentencePiece) -> list[normalizers.Normalizer]:
    """The fold of case and accents."""
    normalisation = tokenizer.normalisation
    steps = []
    if normalisation.strip_accents:
        # A first character that is stripped takes the place where a line's first space
        # is put with it.
        steps.append(normalizers.Replace(Regex(r"\A\p{Mn}+"), " "))
    if normalisation.lowercase or normalisation.strip_accents:
        steps.append(normalisation.normalizer(clean=False))
    return steps


def _rule(model: Model) -> list[normalizers.Normalizer]:
    """The model's own normal form."""
    rule = list(charsmap_normalizers(model.charsmap, model.normal_form))
    if not model.joins_spaces:
        return rule
    joined = normalizers.Replace(Regex(" {2,}"), " ")
    return [*rule, joined, normalizers.Replace(Regex(r"[ ▁]+\z"), "")]


def _unigram(model: Model, tokenizer: Tokenizer) -> models.Unigram:
    """The model, in which no piece that only looks like text is ever taken for it.

    The spelling with the highest sum of scores is taken. To add the same for each
    character changes nothing about that. What is no text gets it once, however long it
    is, and the least score: then any other spelling has a higher sum, be it of unknown
    characters, and these are still as far below the least score of what is text.
    """
    least = min(piece.score for piece in model.pieces if piece.kind == Kind.NORMAL)
    # Enough for a piece of two characters; a longer one is farther below.
    each = 2 * _UNKNOWN + 1 - math.floor(least)

    def score(i: int, piece: Piece) -> float:
        if piece.kind == Kind.NORMAL:
            return piece.score + each * len(piece.text)
        if piece.kind == Kind.USER_DEFINED and i not in tokenizer.special_ids:
            return _USER_DEFINED + each * len(piece.text)
        return least + each

    return models.Unigram(
        [(piece.text, score(i, piece)) for i, piece in enumerate(model.pieces)],
        unk_id=tokenizer.unk_id,
        byte_fallback=model.byte_fallback,
    )


def _bpe(model: Model, tokenizer: Tokenizer) -> models.BPE:
    """The model with all the pairs that make a piece, those of the best piece first."""
    for i, piece in enumerate(model.pieces):
        odd = piece.kind in (Kind.USER_DEFINED, Kind.UNUSED)
        if odd and i not in tokenizer.special_ids:
            kind = piece.kind.name.lower().replace("_", "-")
            raise InputError(
                f"the SentencePiece model has a {kind} piece, {piece.text!r}, which the"
                " BPE of Hugging Face's tokenizers has not"
            )
    normal = [piece for piece in model.pieces if piece.kind == Kind.NORMAL]
    known = {piece.text for piece in normal}
    pairs = [
        (piece.text[:i], piece.text[i:])
        for piece in sorted(normal, key=lambda piece: -piece.score)
        for i in range(1, len(piece.text))
    ]
    return models.BPE(
        {piece.text: i for i, piece in enumerate(model.pieces)},
        [(left, right) for left, right in pairs if left in known and right in known],
        unk_token=tokenizer.specials.unk,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )
