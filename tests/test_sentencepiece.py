"""SentencePiece: BERT's words, what is learned, what is refused."""

import io
import itertools
import string
import unicodedata

import numpy as np
import pytest
import sentencepiece as library
from tokenizers import normalizers, pre_tokenizers

from spanbert_jax.corpus.sentencepiece import load_sentencepiece, train_sentencepiece
from spanbert_jax.corpus.tokenizers import ENDS, STARTS, Normalisation, Specials
from spanbert_jax.errors import InputError
from vocabularies import (
    CJK,
    LETTERS,
    PUNCTUATION,
    SPECIALS,
    learn,
    random_lines,
    run_python,
    spell,
    tricky_lines,
)

MODEL_TYPES = ("unigram", "bpe")
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def words_of(tokenizer, line: str) -> list[list[int]]:
    """The tokens of a line, a list for each word."""
    words: list[list[int]] = []
    before = ENDS
    for i in tokenizer.encode([line])[0]:
        edges = int(tokenizer.word_edges[i])
        if edges & STARTS or before & ENDS or not words:
            words.append([])
        words[-1].append(i)
        before = edges if words else ENDS
    return words


def spelt_words(tokenizer, line: str) -> list[str]:
    """The words of a line as they look, a space alone left out."""
    words = words_of(tokenizer, line)
    spelt = ["".join(tokenizer.spell(i)[0] for i in word) for word in words]
    return [word for word in spelt if word]


def bert_words(line: str) -> list[str]:
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=False
    )
    text = normalizer.normalize_str(unicodedata.normalize("NFKC", line))
    return [
        word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)
    ]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_words_are_those_of_bert(model_type):
    characters = LETTERS + CJK + PUNCTUATION + "\u00a0\t\u3000"
    lines = tricky_lines(2000, characters)
    least = len(set("".join(lines)))
    # Pieces of a character or two: none reaches over the border of a word but "n'".
    tokenizer = train_sentencepiece(
        [*lines, *characters] * 3, 5 + 2 * least, model_type, byte_fallback=False
    )
    texts = [tokenizer.spell(i)[0] for i in range(5, tokenizer.vocab_size)]
    pure = {text for text in texts if len(bert_words(text)) <= 1}
    compared = 0
    for line in lines:
        pieces = [tokenizer.spell(i)[0] for i in tokenizer.encode([line])[0]]
        if pure.issuperset(pieces):
            assert spelt_words(tokenizer, line) == bert_words(line)
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_piece_has_the_edges_of_its_characters(model_type):
    tokenizer = learn(model_type)
    assert tokenizer.word_edges.dtype == np.uint8
    assert tokenizer.word_edges.shape == (tokenizer.vocab_size,)
    assert not tokenizer.word_edges[:5].any()
    for i in range(5 + 256, tokenizer.vocab_size):
        text, spaced = tokenizer.spell(i)
        # BERT drops a soft hyphen.
        if "\u00ad" not in text:
            # A letter put before or behind is of the same word, or it is not.
            words = bert_words(f"x{text}y")
            starts, ends = spaced or words[0] == "x", words[-1] == "y"
            assert tokenizer.word_edges[i] == STARTS * starts + ENDS * ends


def test_words_in_bytes_stay_whole():
    tokenizer = train_sentencepiece(random_lines(50), 400, "unigram")
    assert tokenizer.tokens[5:261] == tuple(BYTES)

    def words(line):
        spelt = [[tokenizer.tokens[i] for i in w] for w in words_of(tokenizer, line)]
        return ["".join(word).lstrip("▁") for word in spelt]

    assert words("nao aéo a😀") == [
        "nao",
        "a<0xC3><0xA9>o",
        "a<0xF0><0x9F><0x98><0x80>",
    ]
    # The letter behind is of the ideograph's word: its last byte says nothing.
    assert words("a中a") == ["a", "<0xE4><0xB8><0xAD>a"]
    assert words("a#a") == ["a", "<0x23>", "a"]
    edges = dict(zip(BYTES, tokenizer.word_edges[5:261].tolist(), strict=True))
    for value, token in enumerate(BYTES):
        symbol = chr(value) in string.punctuation
        cjk = 0x4000 >> 12 <= value - 0xE0 <= 0x9FFF >> 12
        assert bool(edges[token] & STARTS) == (symbol or cjk)
        assert bool(edges[token] & ENDS) == (
            symbol or chr(value) in "\t\n\v\f\r\x1c\x1d\x1e\x1f "
        )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ids_are_those_of_the_library(model_type):
    tokenizer = learn(model_type)
    lines = [*random_lines(100, seed=3), *tricky_lines(300)]
    processor = library.SentencePieceProcessor(model_proto=tokenizer.model)
    assert tokenizer.encode(lines) == processor.Encode(lines)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_learned_model_is_that_of_any_other_process(model_type):
    code = f"import vocabularies as v\nprint(v.learn({model_type!r}).sha256)"
    shas = {learn(model_type).sha256}
    for _ in range(2):
        done = run_python(code)
        assert done.stderr == ""
        shas.add(done.stdout.strip())
    assert len(shas) == 1


@pytest.mark.parametrize(("byte_fallback", "size"), [(True, 420), (False, 164)])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_learned_model_spells_its_text(model_type, byte_fallback, size):
    lines = random_lines(300)
    tokenizer = train_sentencepiece(
        lines, size, model_type, byte_fallback=byte_fallback
    )
    assert tokenizer.vocab_size == size
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert tokenizer.tokens[:5] == tuple(SPECIALS)
    assert (tokenizer.tokens[5:261] == tuple(BYTES)) == byte_fallback
    ids = tokenizer.encode(lines)
    assert tokenizer.unk_id not in set(itertools.chain.from_iterable(ids))
    assert sum(map(len, ids)) < 0.6 * sum(map(len, lines))
    processor = library.SentencePieceProcessor(model_proto=tokenizer.model)
    assert [processor.Decode(line) for line in ids] == lines
    rare = spell(tokenizer, "ж")
    assert rare == ["▁", *(["<0xD0>", "<0xB6>"] if byte_fallback else ["[UNK]"])]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_vocabulary_is_that_of_the_words_alone(model_type):
    lines = random_lines(300)
    tokens = train_sentencepiece(lines, 400, model_type).tokens
    for other in ([" ".join(lines)], "  ".join(lines).split(), reversed(lines)):
        assert train_sentencepiece(other, 400, model_type).tokens == tokens
    # The library alone learns much the same, from text in which no passage comes twice:
    # what it counts as a candidate depends a little on what stands beside a word.
    model = io.BytesIO()
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter([*lines, " ".join(sorted(set("".join(SPECIALS))))]),
        model_writer=model,
        model_type=model_type,
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        required_chars="".join(sorted(set("".join(SPECIALS)))),
        control_symbols=["[PAD]", "[MASK]"],
        unk_piece="[UNK]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        num_threads=1,
        minloglevel=2,
    )
    processor = library.SentencePieceProcessor(model_proto=model.getvalue())
    theirs = {processor.IdToPiece(i) for i in range(processor.GetPieceSize())}
    assert len(theirs & set(tokens)) > 0.9 * len(tokens)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_text_that_comes_twice_takes_no_longer(model_type):
    # The library's own time is the square of this: an hour.
    lines = random_lines(4000)
    once = train_sentencepiece(lines, 400, model_type)
    twice = train_sentencepiece(lines * 2, 400, model_type)
    assert len(set(once.tokens) & set(twice.tokens)) > 380


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "lines",
    [
        ["to be or not to be"],
        ["a"],
        ["", "\0", "  ", "\ud800"],
        ["a" * 70_000],
        # NFKC makes 18 characters out of one.
        ["ﷺ" * 9000],
    ],
)
def test_small_and_odd_texts_give_a_small_vocabulary(model_type, lines):
    tokenizer = train_sentencepiece(lines, 1000, model_type)
    assert 5 + 256 < tokenizer.vocab_size < 400
    for ids in tokenizer.encode(lines):
        assert tokenizer.unk_id not in ids


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_text_without_a_word_is_refused(model_type):
    for lines in ([], ["", "  "], ["\t\u3000", "\u2581", "\x01\ufffd"]):
        with pytest.raises(InputError, match="hold no word to learn"):
            train_sentencepiece(lines, 1000, model_type)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_too_small_a_vocabulary_is_refused_with_the_numbers(model_type):
    alphabet = set("".join(random_lines(100))) - {" "}
    needed = 5 + 256 + len(alphabet | set("".join(SPECIALS)) | {"▁"})
    for size in (-1, 3, 200, needed - 1):
        with pytest.raises(InputError) as error:
            train_sentencepiece(random_lines(100), size, model_type)
        assert f"--vocab_size={size} is too small" in str(error.value)
    assert str(error.value).endswith(f"take {needed}")
    tokenizer = train_sentencepiece(random_lines(100), needed, model_type)
    assert tokenizer.vocab_size == needed


def test_a_special_token_spelt_like_a_piece_is_refused():
    with pytest.raises(InputError, match=r"'a' is spelt like a piece.*'\[a\]'"):
        train_sentencepiece(random_lines(50), 400, "unigram", Specials(mask="a"))


def test_what_becomes_of_white_space_and_control_characters():
    tokenizer = train_sentencepiece(random_lines(50), 400, "unigram")
    plain = tokenizer.encode(["ab cd"])[0]
    for space in ("\t", "\u00a0", "\u3000", "\u2581", "\u2028", "\u200b", "  ", "\r"):
        assert tokenizer.encode([f"ab{space}cd", f"{space}ab cd{space}"]) == [plain] * 2
    assert tokenizer.encode(["a\x01b\x7f cd\x1f"])[0] == plain
    # BERT drops it; the library takes it for a character.
    assert "<0x00>" in spell(tokenizer, "ab\0cd")


@pytest.mark.parametrize("form", ["none", "nfkc", "nfc"])
def test_the_rule_of_a_model_follows_the_form_that_text_is_read_in(form):
    normalisation = Normalisation(unicode=form)
    tokenizer = train_sentencepiece(
        random_lines(50), 400, "unigram", normalisation=normalisation
    )
    same = tokenizer.encode(["ﬁ½"]) == tokenizer.encode(["fi1⁄2"])
    assert same == (form != "nfc")
    assert tokenizer.encode(["ab\tcd\u00a0"]) == tokenizer.encode(["ab cd"])
    assert tokenizer.normalisation == normalisation


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_broken_models_are_refused(tmp_path, share):
    model = learn("unigram").model
    path = tmp_path / "m.model"
    path.write_bytes(model[: int(share * len(model))])
    message = "is empty" if share == 0 else "is no SentencePiece model, or it is cut"
    with pytest.raises(InputError, match=f"--vocab={path} {message}"):
        load_sentencepiece(path)


def foreign_model(**options) -> bytes:
    """A model as others train it."""
    model = io.BytesIO()
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter([*random_lines(100), "[ ] M A S K"]),
        model_writer=model,
        vocab_size=100,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def test_a_mask_that_is_found_in_text_is_unknown_there(tmp_path):
    model = foreign_model(
        control_symbols=["[PAD]", "[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]"],
        unk_piece="[UNK]",
    )
    (tmp_path / "m.model").write_bytes(model)
    tokenizer = load_sentencepiece(tmp_path / "m.model")
    processor = library.SentencePieceProcessor(model_proto=model)
    assert tokenizer.mask_id in processor.Encode("ab [MASK] cd")
    ids = tokenizer.encode(["ab [MASK] cd"])[0]
    assert tokenizer.mask_id not in ids
    assert tokenizer.unk_id in ids
    assert tokenizer.encode_with_offsets(["ab [MASK] cd"])[0].ids.tolist() == ids


def test_a_model_that_does_not_mark_where_a_line_begins_is_refused(tmp_path):
    model = foreign_model(
        control_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        unk_piece="[UNK]",
        add_dummy_prefix=False,
    )
    (tmp_path / "m.model").write_bytes(model)
    with pytest.raises(InputError, match="add_dummy_prefix=false"):
        load_sentencepiece(tmp_path / "m.model")


def test_another_unknown_token_than_the_models_is_refused(tmp_path):
    model = foreign_model(control_symbols=SPECIALS)
    (tmp_path / "m.model").write_bytes(model)
    with pytest.raises(InputError, match=r"'\[UNK\]' is not its .*'<unk>'"):
        load_sentencepiece(tmp_path / "m.model")


def test_models_that_spell_spaces_behind_words(tmp_path):
    model = foreign_model(
        control_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        unk_piece="[UNK]",
        treat_whitespace_as_suffix=True,
    )
    (tmp_path / "m.model").write_bytes(model)
    tokenizer = load_sentencepiece(tmp_path / "m.model")
    for line in random_lines(30):
        words = spelt_words(tokenizer, line.removesuffix("."))
        assert [word.strip() for word in words if word.strip()] == line[:-1].split()
