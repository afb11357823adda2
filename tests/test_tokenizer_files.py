"""Our tokenizers in the libraries of Hugging Face: the same ids, and whole files."""

import functools
import io
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as library
from tokenizers import Tokenizer as Encoder

import toy
from spanbert_jax.corpus.sentencepiece import load_sentencepiece, train_sentencepiece
from spanbert_jax.corpus.tokenizers import (
    Normalisation,
    Specials,
    Tokenizer,
    load_saved,
    load_tokenizer,
)
from spanbert_jax.corpus.wordpiece import load_wordpiece, train_wordpiece
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.interop.tokenizer import fast_tokenizer, write_tokenizer
from spanbert_jax.interop.vocabulary import read_vocabulary
from vocabularies import SPECIALS, random_lines, tricky_lines, write_vocabulary

DATA = Path(__file__).parents[2] / "shared" / "data"
UNCASED = Normalisation(lowercase=True, strip_accents=True)
# Name: kind, normalisation, and whether rare characters are spelt in bytes.
CASES = {
    "wordpiece": ("wordpiece", Normalisation(), None),
    "wordpiece, uncased": ("wordpiece", UNCASED, None),
    "wordpiece, nfc": ("wordpiece", Normalisation(unicode="nfc"), None),
    "unigram": ("unigram", Normalisation(), True),
    "unigram without bytes": ("unigram", Normalisation(), False),
    "unigram, nfc": ("unigram", Normalisation(unicode="nfc"), False),
    "unigram, lower case": ("unigram", Normalisation(lowercase=True), True),
    "unigram, uncased": ("unigram", UNCASED, False),
    "bpe": ("bpe", Normalisation(), True),
    "bpe without bytes, nfkc": ("bpe", Normalisation(unicode="nfkc"), False),
    "bpe, uncased": ("bpe", UNCASED, True),
}
LINES = [
    *tricky_lines(1000),
    *random_lines(50, seed=9),
    *(character * n for character in "-.a" for n in range(40)),
    *("ab" * n for n in range(30)),
    *("", " ", "  a  b ", "\u0301", "\u0301a", "a" * 100, "b" * 101, "[mask]"),
    *SPECIALS,
    "<0x41>[UNK]<0xC3>",
    "é" * 300,
]


def train(
    lines: Sequence[str],
    vocab_size: int,
    kind: str,
    normalisation: Normalisation,
    byte_fallback: bool | None,
) -> Tokenizer:
    if kind == "wordpiece":
        return train_wordpiece(lines, vocab_size, normalisation=normalisation)
    return train_sentencepiece(
        lines, vocab_size, kind, None, normalisation, byte_fallback
    )


@functools.cache
def make(case: str) -> Tokenizer:
    return train([*random_lines(200), *tricky_lines(100)], 700, *CASES[case])


def as_read(lines: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Lines in the form in which a corpus for this tokenizer has them."""
    form = tokenizer.normalisation.unicode
    if form == "none":
        return list(lines)
    return [unicodedata.normalize(form.upper(), line) for line in lines]


def reload(tokenizer: Tokenizer) -> Encoder:
    """What is in tokenizer.json."""
    return Encoder.from_str(fast_tokenizer(tokenizer).to_str())


def text_ids(fast: Encoder, lines: Sequence[str]) -> list[list[int]]:
    """The ids of lines in which a special token is text."""
    fast.encode_special_tokens = True
    encodings = fast.encode_batch(lines, add_special_tokens=False)
    fast.encode_special_tokens = False
    return [encoding.ids for encoding in encodings]


def foreign(directory: Path, lines: Sequence[str] = (), **options) -> Tokenizer:
    """A SentencePiece model as others learn it."""
    model = io.BytesIO()
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter([*random_lines(200), *lines, "[ ] M A S K x"]),
        model_writer=model,
        minloglevel=2,
        **{
            "vocab_size": 200,
            "required_chars": "[]MASKx",
            "unk_piece": "[UNK]",
            "control_symbols": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
            "hard_vocab_limit": False,
            **options,
        },
    )
    return load_bytes(directory, model.getvalue())


def load_bytes(directory: Path, model: bytes) -> Tokenizer:
    (directory / "foreign.model").write_bytes(model)
    return load_sentencepiece(directory / "foreign.model")


@pytest.mark.parametrize("case", CASES)
def test_ids_are_ours(case):
    tokenizer = make(case)
    expected = tokenizer.encode(as_read(LINES, tokenizer))
    for line, theirs, ours in zip(
        LINES, text_ids(reload(tokenizer), LINES), expected, strict=True
    ):
        assert theirs == ours, ascii(line)


@pytest.mark.parametrize("case", CASES)
def test_every_id_is_the_same_token(case):
    tokenizer, fast = make(case), reload(make(case))
    assert fast.get_vocab_size() == tokenizer.vocab_size
    tokens = map(fast.id_to_token, range(tokenizer.vocab_size))
    assert tuple(tokens) == tokenizer.tokens


@pytest.mark.parametrize("case", CASES)
def test_a_masked_word_is_masked_as_in_training(case):
    tokenizer, fast = make(case), reload(make(case))
    for number, line in enumerate(random_lines(60, seed=4)):
        words = list(re.finditer(r"\w+", line))
        word = words[(0, -1, number)[number % 3] % len(words)]
        whole = tokenizer.encode_with_offsets([line])[0]
        inside = (whole.begin >= word.start()) & (whole.end <= word.end())
        expected = whole.ids[~inside].tolist()
        expected.insert(int(inside.argmax()), tokenizer.mask_id)
        masked = line[: word.start()] + "[MASK]" + line[word.end() :]
        assert fast.encode(masked, add_special_tokens=False).ids == expected


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_stand_around_one_text_and_two(case):
    tokenizer, fast = make(case), reload(make(case))
    first, second = tokenizer.encode(["abc, fed", "d"])
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    one, two = fast.encode("abc, fed"), fast.encode("abc, fed", "d")
    assert one.ids == [cls, *first, sep]
    assert one.type_ids == [0] * len(one.ids)
    assert two.ids == [*one.ids, *second, sep]
    assert two.type_ids == [0] * len(one.ids) + [1] * (len(second) + 1)
    special = [i in (cls, sep) for i in two.ids]
    assert two.special_tokens_mask == [int(flag) for flag in special]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_from_the_same_places(case):
    tokenizer, fast = make(case), reload(make(case))
    lines = [*random_lines(50), "ﬁx, “naïve” ½ 中文 (Σς) x.", "a  b c "]
    for line, ours in zip(lines, tokenizer.encode_with_offsets(lines), strict=True):
        theirs = fast.encode(line, add_special_tokens=False)
        assert theirs.ids == ours.ids.tolist()
        for token, place, begin, end in zip(
            theirs.tokens, theirs.offsets, ours.begin, ours.end, strict=True
        ):
            # Theirs have the space before a word; to ours, a space alone is nothing.
            if token != "▁":
                assert line[slice(*place)].strip() == line[begin:end]


@pytest.mark.parametrize("case", CASES)
def test_what_is_decoded_is_readable(case):
    tokenizer, fast = make(case), reload(make(case))
    if tokenizer.kind == "sentencepiece":
        theirs = library.SentencePieceProcessor(model_proto=tokenizer.model).Decode
        lines = [ids for ids in text_ids(fast, LINES) if tokenizer.unk_id not in ids]
        assert len(lines) > 100
        assert fast.decode_batch(lines) == theirs(lines)
    lines = [line.replace("ö", "o") for line in random_lines(50)]
    assert fast.decode_batch([fast.encode(line).ids for line in lines]) == lines


@pytest.mark.parametrize("spellings", [SPECIALS, ["<p>", "??", "<s>", "-s-", "<mask>"]])
@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_special_tokens_of_any_spelling(kind, spellings):
    lines = [f"x{a} {b} y." for a in spellings for b in spellings] + random_lines(50)
    specials = Specials(*spellings)
    tokenizer = (
        train_wordpiece(lines, 400, specials)
        if kind == "wordpiece"
        else train_sentencepiece(lines, 400, kind, specials)
    )
    fast = reload(tokenizer)
    assert text_ids(fast, lines + spellings) == tokenizer.encode(lines + spellings)
    for spelling, i in zip(spellings, tokenizer.special_ids, strict=True):
        for line in (spelling, f"x {spelling}. x", f"{spelling} x{spelling}"):
            assert fast.encode(line, add_special_tokens=False).ids.count(i) == (
                line.count(spelling)
            )


def test_a_special_token_that_is_a_word_is_found_in_text(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "mask", "a", "m", "##a", "##s", "##k"]
    path = write_vocabulary(tmp_path / "vocab.txt", tokens)
    tokenizer = load_wordpiece(path, Specials(mask="mask"))
    assert tokenizer.encode(["a mask"]) == [[5, 6, 7, 8, 9]]
    assert text_ids(reload(tokenizer), ["a mask", "a ma"]) == [[5, 4], [5, 6, 7]]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_special_token_that_a_model_has_for_text_is_spelt_out(tmp_path, model_type):
    tokenizer = foreign(
        tmp_path,
        model_type=model_type,
        control_symbols=["[PAD]", "[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]"],
    )
    fast = reload(tokenizer)
    lines = [*random_lines(20), "ab [cd] MASK"]
    assert text_ids(fast, lines) == tokenizer.encode(lines)
    assert tokenizer.encode(["ab [MASK]"])[0][-1] == tokenizer.unk_id
    tokens = fast.id_to_token, text_ids(fast, ["ab [MASK]"])[0]
    assert "".join(map(*tokens)) == "▁ab▁[MASK]"
    assert fast.encode("ab [MASK]").ids[-2] == tokenizer.mask_id


def test_what_only_looks_like_a_piece_is_spelt_in_unknown_characters(tmp_path):
    tokenizer = foreign(
        tmp_path,
        model_type="unigram",
        required_chars="Ax",
        byte_fallback=True,
        vocab_size=300,
    )
    assert not {*"[]MSK<04>"} & set(tokenizer.tokens)
    lines = ["ab [MASK]", "ab[MASK]c [MASK][PAD]", "<0x41><0x00> [A]"]
    fast = reload(tokenizer)
    assert text_ids(fast, lines) == tokenizer.encode(lines)
    # But for one that is nothing but unknown characters.
    assert text_ids(fast, ["ab [CLS] ab"])[0].count(tokenizer.cls_id) == 1


def test_user_defined_pieces_of_a_unigram_model(tmp_path):
    symbols = ["(", ")", "-", "ab", "cde", "£"]
    tokenizer = foreign(tmp_path, user_defined_symbols=symbols, model_type="unigram")
    generator = np.random.default_rng(0)
    letters = [*symbols, *"abcde ", " ", " "]
    lines = ["".join(generator.choice(letters, 12)) for _ in range(1500)]
    ours = tokenizer.encode(lines)
    defined = {tokenizer.tokens.index(symbol) for symbol in symbols}
    assert defined <= {i for ids in ours for i in ids}
    assert text_ids(reload(tokenizer), lines) == ours


def test_unknown_characters_that_could_be_avoided(tmp_path):
    lines = ["aqu qub cqu uqa uq"] * 100
    tokenizer = foreign(tmp_path, lines, model_type="unigram")
    # What is a character of pieces is no piece any more.
    model = tokenizer.model.replace(b"\x0a\x01q\x15", b"\x0a\x01~\x15", 1)
    assert model != tokenizer.model
    tokenizer = load_bytes(tmp_path, model)
    assert "qu" in tokenizer.tokens
    generator = np.random.default_rng(0)
    lines = ["".join(generator.choice([*"abcquuq "], 12)) for _ in range(1500)]
    ours = tokenizer.encode(lines)
    assert tokenizer.unk_id in {i for ids in ours for i in ids}
    assert text_ids(reload(tokenizer), lines) == ours


def test_spellings_that_are_equally_good(tmp_path):
    lines = [f"{line[:9]}..." for line in random_lines(300)]
    tokenizer = foreign(tmp_path, lines, model_type="unigram")
    assert ".." in tokenizer.tokens
    assert "..." not in tokenizer.tokens
    lines = [f"{line}.." for line in random_lines(1000, seed=2)]
    ours = tokenizer.encode(lines)
    theirs = text_ids(reload(tokenizer), lines)
    differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert 0 < len(differ) < len(lines)
    for a, b in differ:
        assert sorted(a) == sorted(b)
        spelt = ["".join(tokenizer.tokens[i] for i in ids) for ids in (a, b)]
        assert spelt[0] == spelt[1]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "identity"},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"remove_extra_whitespaces": False},
        {"split_by_whitespace": False, "vocab_size": 300},
        {"byte_fallback": True, "vocab_size": 500},
    ],
)
def test_models_of_others(tmp_path, options, model_type):
    tokenizer = foreign(tmp_path, tricky_lines(50), model_type=model_type, **options)
    normal = library.SentencePieceNormalizer(model_proto=tokenizer.model).Normalize
    # A space, or a "▁", that a line still begins with is one less.
    lines = [*tricky_lines(1000), *random_lines(50, seed=8), "a ▁", "a", "  "]
    lines = [line for line in lines if not re.match("▁(▁|$)", normal(line))]
    assert len(lines) > 700
    assert text_ids(reload(tokenizer), lines) == tokenizer.encode(lines)


def test_a_mask_takes_the_space_before_it_even_if_spaces_are_kept(tmp_path):
    tokenizer = foreign(tmp_path, remove_extra_whitespaces=False, model_type="bpe")
    ids = reload(tokenizer).encode("ab [MASK], cd").ids
    before, behind = tokenizer.encode(["ab", "ab, cd"])
    assert ids[1:-1] == [*before, tokenizer.mask_id, *behind[len(before) :]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, "of type word; .* unigram and bpe only"),
        ({"model_type": "char"}, "of type char; .* unigram and bpe only"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true"),
        (
            {"model_type": "bpe", "user_defined_symbols": ["ab"]},
            "has a user-defined piece, 'ab', which",
        ),
    ],
)
def test_models_that_have_no_counterpart_are_refused(tmp_path, options, message):
    tokenizer = foreign(tmp_path, **options)
    with pytest.raises(InputError, match=message):
        write_tokenizer(tokenizer, tmp_path / "new", 512)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("case", ["wordpiece", "unigram"])
def test_text_that_no_tokenizer_should_meet(case):
    tokenizer, fast = make(case), reload(make(case))
    with pytest.raises(TypeError):
        fast.encode("ab \ud800")
    # We encode it in parts, at spaces.
    long = "ab cde, f " * 20_000
    assert text_ids(fast, [long]) == tokenizer.encode([long])
    if tokenizer.kind == "sentencepiece":
        assert text_ids(fast, ["a\ufff0b\ufff1"]) == tokenizer.encode(["ab"])


@pytest.mark.parametrize("case", ["wordpiece, uncased", "unigram, nfc", "bpe"])
def test_files_are_those_of_any_other_time(case, tmp_path):
    tokenizer = make(case)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tokenizer(tokenizer, tmp_path / name, 512)
    files = toy.contents(tmp_path / "a")
    assert files == toy.contents(tmp_path / "b")
    assert set(files) == {
        tokenizer.file_name,
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert load_saved(tmp_path / "a", None, tokenizer.normalisation) == tokenizer
    found = read_vocabulary(tmp_path / "a")
    assert found == (tokenizer.tokens, tokenizer.normalisation.lowercase)
    config = json.loads(files["tokenizer_config.json"])
    assert config["do_lower_case"] == tokenizer.normalisation.lowercase
    assert config["strip_accents"] == tokenizer.normalisation.strip_accents
    assert config["model_max_length"] == 512
    is_bert = case == "wordpiece, uncased"
    name = "BertTokenizer" if is_bert else "PreTrainedTokenizerFast"
    assert config["tokenizer_class"] == name


def test_a_directory_that_is_not_there_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write to .*nowhere"):
        write_tokenizer(make("wordpiece"), tmp_path / "nowhere", 512)


@pytest.fixture(scope="module")
def auto():
    """`AutoTokenizer`, which finds no network."""
    transformers = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", None)
        yield transformers.AutoTokenizer


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    """The files of each case, for some beside those of a model."""
    found = {}
    for number, case in enumerate(CASES):
        found[case] = tmp_path_factory.mktemp("files")
        write_tokenizer(make(case), found[case], 40)
        if number % 2:
            config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
            (found[case] / "config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize("case", CASES)
def test_auto_tokenizer_gives_our_ids(auto, directories, case, tmp_path):
    tokenizer = make(case)
    theirs = auto.from_pretrained(directories[case], split_special_tokens=True)
    ids = theirs(LINES, add_special_tokens=False, verbose=False)["input_ids"]
    assert ids == tokenizer.encode(as_read(LINES, tokenizer))
    # What they write themselves is as good.
    again = auto.from_pretrained(directories[case])
    again.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path, split_special_tokens=True)
    assert again(LINES, add_special_tokens=False, verbose=False)["input_ids"] == ids


@pytest.mark.parametrize("case", CASES)
def test_auto_tokenizer_knows_the_special_tokens(auto, directories, case):
    tokenizer = make(case)
    theirs = auto.from_pretrained(directories[case])
    named = [getattr(theirs, f"{r}_token_id") for r in vars(tokenizer.specials)]
    assert tuple(named) == tokenizer.special_ids
    assert sorted(theirs.all_special_ids) == sorted(tokenizer.special_ids)
    assert len(theirs) == theirs.vocab_size == tokenizer.vocab_size
    for line in ("[MASK]", "ab [MASK], cd", "[MASK] ab[MASK]", "[MASK] [MASK]."):
        ids = theirs(line)["input_ids"]
        assert ids.count(theirs.mask_token_id) == line.count("[MASK]")


@pytest.mark.parametrize("case", CASES)
def test_auto_tokenizer_makes_a_batch(auto, directories, case):
    tokenizer = make(case)
    theirs = auto.from_pretrained(directories[case])
    short, long = tokenizer.encode(["ab", "ab, cd"])
    batch = theirs([("ab", "ab"), ("ab", "ab, cd")], padding=True)
    pads = len(long) - len(short)
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    head = [cls, *short, sep]
    first = [*head, *short, sep, *[tokenizer.pad_id] * pads]
    assert batch["input_ids"] == [first, [*head, *long, sep]]
    kinds = [0] * len(head) + [1] * (len(long) + 1)
    assert batch["token_type_ids"][1] == kinds
    assert batch["attention_mask"][0] == [1] * (len(first) - pads) + [0] * pads
    assert theirs.model_max_length == 40
    assert len(theirs("ab " * 50, truncation=True)["input_ids"]) == 40


@pytest.mark.parametrize("case", CASES)
def test_auto_tokenizer_decodes(auto, directories, case):
    theirs = auto.from_pretrained(directories[case])
    line = random_lines(1)[0].replace("ö", "o")
    ids = theirs(line)["input_ids"]
    assert theirs.decode(ids, skip_special_tokens=True) == line
    assert theirs.decode(ids).startswith("[CLS] ")


real_text = pytest.mark.skipif(
    not DATA.exists(), reason=f"no real text: {DATA} is not there"
)


@functools.cache
def real_lines() -> list[str]:
    paths = sorted((DATA / "corpus").glob("*.valid.txt"))
    lines = [line for path in paths for line in path.read_text().split("\n")]
    return list(filter(None, lines))


@real_text
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_auto_tokenizer_on_real_text(auto, case, tmp_path, capsys):
    lines = real_lines()
    tokenizer = train(lines[:1000], 3000, *CASES[case])
    write_tokenizer(tokenizer, tmp_path, 512)
    theirs = auto.from_pretrained(tmp_path, split_special_tokens=True)
    ids = theirs(lines, add_special_tokens=False, verbose=False)["input_ids"]
    ours = tokenizer.encode(as_read(lines, tokenizer))
    differ = sum(a != b for a, b in zip(ids, ours, strict=True))
    tokens = sum(map(len, ours))
    with capsys.disabled():
        print(f"\n{case}: {differ} of {len(lines)} lines, {tokens} tokens differ")
    assert len(lines) > 2000
    assert differ == 0


@real_text
def test_the_vocabulary_of_bert(auto, tmp_path):
    tokenizer = load_tokenizer(DATA / "wordpiece" / "vocab.txt")
    write_tokenizer(tokenizer, tmp_path, 512)
    theirs = auto.from_pretrained(tmp_path, split_special_tokens=True)
    golden = json.loads((DATA / "wordpiece" / "golden_cased.json").read_text())
    for entry in golden:
        ids = theirs(entry["text"], add_special_tokens=False)["input_ids"]
        assert ids == entry["ids"]
    lines = real_lines()
    ids = theirs(lines, add_special_tokens=False, verbose=False)["input_ids"]
    assert ids == tokenizer.encode(lines)
    masked = auto.from_pretrained(tmp_path)("Paris is the [MASK].")["input_ids"]
    assert masked == [101, 2123, 1110, 1103, 103, 119, 102]
