"""Numbers and text about a corpus, its blocks and their masks, for people to read."""

import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence, Sized

import numpy as np

from spanbert_jax.corpus.store import Corpus
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.data import counter
from spanbert_jax.data.batch import Feed, MaskedBlocks
from spanbert_jax.data.blocks import target_budget
from spanbert_jax.data.masking import ACTION_NAMES, KEEP, SCHEMES, Spans
from spanbert_jax.data.pairs import IS_RANDOM, segment_capacity
from spanbert_jax.data.plan import Plan

# Gives a text the colour of a style: an action's name, "title" or "faint".
Paint = Callable[[str, str], str]

_COLOURS = {"mask": "33", "random": "31", "keep": "32", "title": "1", "faint": "2"}
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")
_BINS = 10
_LABELS = ("[MASK]", "random", "kept")
# By `pairs.IS_NEXT` and `pairs.IS_RANDOM`.
_LABEL_NAMES = ("next", "random")


def in_colour(text: str, style: str) -> str:
    """Paints for a terminal."""
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m"


def in_plain(text: str, style: str) -> str:
    """Leaves a text as it is."""
    del style
    return text


@dataclasses.dataclass(frozen=True)
class MaskStatistics:
    """What the masks of some blocks are like.

    Attributes:
        blocks: how many there are, at least one.
        tokens: in them, without [CLS] and [SEP].
        words: in them.
        unknown_words: those that hold the unknown token.
        tags: those that the scheme masks.
        long_tags: those of more words than a span may have.
        tagged_share: part of the spans that are a tag from end to end.
        targets: int64 [blocks], targets of each.
        unused_share: part of the budget that was not used.
        drawn_length: mean length of the spans as drawn, in words; for the scheme
            "subword" in tokens.
        placed_length: mean length as placed, in the same unit.
        placed_tokens: mean length as placed, in tokens.
        action_shares: parts of the targets, in the order of `ACTION_NAMES`.
    """

    blocks: int
    tokens: int
    words: int
    unknown_words: int
    tags: int
    long_tags: int
    tagged_share: float
    targets: np.ndarray
    unused_share: float
    drawn_length: float
    placed_length: float
    placed_tokens: float
    action_shares: tuple[float, ...]


def sample_blocks(plan: Plan, size: int, seed: int) -> np.ndarray:
    """Draws blocks without replacement; a larger sample begins with the smaller one.

    Args:
        plan: the blocks.
        size: how many; all of them if there are fewer.
        seed: of the sample.

    Returns:
        int64 [min(size, N)], numbers of blocks.
    """
    total = plan.num_blocks
    places = np.arange(min(size, total), dtype=np.int64)
    return counter.permute(places, total, counter.root_key(seed))


def mask_statistics(feed: Feed, masked: MaskedBlocks) -> MaskStatistics:
    """Counts what masking did to at least one block.

    Shares and lengths are 0 where there is no target.
    """
    masks, offsets, words = masked.masks, masked.offsets, masked.words
    budget = target_budget(np.diff(offsets), feed.masking.ratio)
    actions = np.bincount(masks.action, minlength=len(ACTION_NAMES))
    spans, targets = max(len(masks.spans.first), 1), max(len(masks.target), 1)
    tag_lengths = words.tags[:, 1] - words.tags[:, 0]
    return MaskStatistics(
        blocks=len(offsets) - 1,
        tokens=len(masked.tokens),
        words=len(words.offsets) - 1,
        unknown_words=len(words.unknown),
        tags=len(tag_lengths),
        long_tags=int((tag_lengths > feed.masking.max_span_words).sum()),
        tagged_share=_tagged(masks.spans, words.tags) / spans,
        targets=np.diff(np.searchsorted(masks.target, offsets)),
        unused_share=float(masks.unused.sum() / budget.sum()),
        drawn_length=int(masks.spans.drawn.sum()) / spans,
        placed_length=int((masks.spans.last - masks.spans.first).sum()) / spans,
        placed_tokens=len(masks.target) / spans,
        action_shares=tuple((actions / targets).tolist()),
    )


def _tagged(spans: Spans, tags: np.ndarray) -> int:
    """How many spans are a tag from end to end."""
    runs = set(map(tuple, tags.tolist()))
    placed = np.stack([spans.first, spans.last], axis=1).tolist()
    return sum(tuple(span) in runs for span in placed)


def describe_corpus(corpus: Corpus, paint: Paint) -> Iterator[str]:
    """Yields lines: vocabulary, documents, tokens and unknown tokens of each split."""
    tokenizer = corpus.tokenizer
    unknown = tokenizer.specials.unk
    yield paint(f"corpus {corpus.directory}", "title")
    yield f"  vocabulary {tokenizer.vocab_size:,} tokens, {tokenizer.kind}"
    yield f"  {'split':<7}{'documents':>14}{'dropped':>12}{'tokens':>18}{unknown:>10}"
    for name, entry in corpus.manifest["splits"].items():
        share = entry["unknown_tokens"] / max(entry["tokens"], 1)
        yield (
            f"  {name:<7}{entry['documents']:>14,}{entry['dropped_documents']:>12,}"
            f"{entry['tokens']:>18,}{share:>10.3%}"
        )


def describe_blocks(
    feed: Feed, packed: Plan, width: int, paint: Paint
) -> Iterator[str]:
    """Yields lines: a histogram of lengths, and the rows without and with packing.

    Args:
        feed: with the plan without packing.
        packed: the plan of the same blocks with packing.
        width: columns to fill.
        paint: gives colours.
    """
    plan, block_length = feed.plan, feed.block_length
    lengths, capacity = plan.lengths, block_length - 2
    made_of = f"up to {capacity:,} tokens, [CLS] and [SEP]"
    if feed.pair_slots:
        half = segment_capacity(block_length)
        capacity = 2 * half
        made_of = f"two segments of up to {half:,} tokens, [CLS] and two [SEP]"
    yield paint(
        f"{len(lengths):,} blocks at block length {block_length:,}: {made_of}", "title"
    )
    edges = np.linspace(0, capacity, min(_BINS, capacity) + 1).astype(np.int64)
    counts, _ = np.histogram(lengths, edges + 0.5)
    digits = len(f"{capacity:,}")
    for low, high, count in zip(edges[:-1] + 1, edges[1:], counts, strict=True):
        head = (
            f"  {low:>{digits},} to {high:>{digits},}"
            f"{count:>14,}{count / max(len(lengths), 1):>8.1%}  "
        )
        # Rounded up: a bin with a single block in it shows.
        bar = -(-int(count) * (width - len(head)) // max(int(counts.max()), 1))
        yield (head + "#" * bar).rstrip()
    for name, one in (("without", plan), ("with", packed)):
        yield (
            f"  {name:>7} packing {one.num_rows:>12,} rows,"
            f" {one.fill(block_length):.1%} filled"
        )
    if feed.pair_slots:
        yield from _describe_pairs(feed)


def _describe_pairs(feed: Feed) -> Iterator[str]:
    plan = feed.plan
    share = (plan.labels == IS_RANDOM).sum() / max(plan.num_blocks, 1)
    yield f"  {share:.1%} of the second segments are of another document"
    tokens = int(plan.segments.length.sum(dtype=np.int64))
    # No document is left out but those of a single token.
    if left_out := feed.split.num_tokens - tokens:
        yield f"  documents of a single token, left out: {left_out:,}"


def describe_masks(
    statistics: MaskStatistics, feed: Feed, epoch: int, paint: Paint
) -> Iterator[str]:
    """Yields lines about the masks of a sample of blocks in one epoch."""
    masking, targets = feed.masking, statistics.targets
    scheme = SCHEMES[masking.scheme]
    unit = "tokens" if scheme.pieces else "words"
    placed = f"{statistics.placed_length:.2f} {unit} placed"
    # The other schemes draw no lengths: their spans are the units that came to touch.
    if masking.scheme == "span":
        placed = f"{statistics.drawn_length:.2f} {unit} drawn, {placed}"
    if unit != "tokens":
        placed += f", {statistics.placed_tokens:.2f} tokens"
    shares = zip(statistics.action_shares, _LABELS, strict=True)
    yield paint(
        f"masks of {statistics.blocks:,} blocks: masking {masking.scheme}, replacement"
        f" {masking.replacement}, seed {feed.seed}, epoch {epoch}",
        "title",
    )
    yield (
        f"  targets per block  {targets.mean():.2f} on average, {targets.min()} to"
        f" {targets.max()}"
    )
    yield (
        f"  share masked       {targets.sum() / statistics.tokens:.2%} of"
        f" {statistics.tokens:,} tokens; {float(masking.ratio):.2%} asked for"
    )
    yield f"  budget unused      {statistics.unused_share:.2%}"
    yield f"  span length        {placed}"
    if scheme.tags:
        yield f"  tags               {_tags_in(statistics, scheme.tags)}"
        yield (
            f"                     {statistics.tagged_share:.1%} of the spans are one;"
            f" {statistics.long_tags:,} of more than {masking.max_span_words} words"
            " never are"
        )
    yield (
        f"  never a target     {statistics.unknown_words:,} of {statistics.words:,}"
        " words, which hold the unknown token"
    )
    yield (
        "  replaced by        "
        + ", ".join(f"{share:.1%} {label}" for share, label in shares)
    )


def _tags_in(statistics: MaskStatistics, name: str) -> str:
    rate = 100 * statistics.tags / statistics.words
    return (
        f"{statistics.tags:,} {name.replace('_', ' ')} in the sample, {rate:.1f} per"
        " 100 words"
    )


def explain_spans(paint: Paint) -> Iterator[str]:
    """Yields lines: how to read what `describe_block` says."""
    colours = ", ".join(map(paint, _LABELS, ACTION_NAMES))
    yield paint("how to read the blocks", "title")
    yield f"  {{3:some words}} is span 3, as the text has it; the list says: {colours}."
    yield "  at: position of its first token in the block, [CLS] being at 0."
    yield "  left |  1 first  2 second ...  | right: its tokens with their offsets, for"
    yield "  the span boundary objective, between the two tokens that it looks at."


def describe_block(
    feed: Feed,
    tokenizer: Tokenizer,
    block: int,
    masked: MaskedBlocks,
    width: int,
    paint: Paint,
) -> Iterator[str]:
    """Yields lines: where a block is from, its text with its spans, the spans.

    Args:
        feed: the text and the recipe.
        tokenizer: spells the tokens.
        block: its number in the plan.
        masked: this one block.
        width: columns to fill.
        paint: gives colours.
    """
    view = _view(tokenizer, masked)
    pieces = feed.plan.segments_of(np.array([block])).tolist()
    source = _origin(feed, pieces[0])
    if feed.plan.is_paired:
        source = _LABEL_NAMES[feed.plan.labels[block]]
    unused = int(masked.masks.unused[0])
    yield paint(
        f"block {block:,}, {source}: {_count(masked.tokens, 'token')},"
        f" {_count(masked.masks.target, 'target')} in {_count(view.spans, 'span')}"
        + (f", {unused} of the budget unused" if unused else ""),
        "title",
    )
    if feed.plan.is_paired:
        for name, piece in zip("AB", pieces, strict=True):
            yield paint(f"  {name} from {_origin(feed, piece)}", "faint")
    yield from wrap(_running_text(view, paint), width, "  ", "  ", " ")
    yield paint(f"  {'span':>4}  {'at':>4}  replaced by", "faint")
    for number, span in enumerate(view.spans, start=1):
        yield from _describe_span(number, span, view.tokens, width, paint)


@dataclasses.dataclass(frozen=True)
class _Span:
    """A span; `begin` counts from [CLS]; one action and spelling for each token."""

    begin: int
    actions: list[int]
    became: list[str]


@dataclasses.dataclass(frozen=True)
class _View:
    """A block's tokens, [CLS] to [SEP], as they are and as text, and its spans.

    `spaced` says which of them have a space before them in the running text.
    """

    tokens: list[str]
    texts: list[str]
    spaced: list[bool]
    spans: list[_Span]


def _view(tokenizer: Tokenizer, masked: MaskedBlocks) -> _View:
    tokens = [printable(tokenizer.tokens[i]) for i in masked.tokens]
    spelt = [tokenizer.spell(i) for i in masked.tokens]
    texts = [printable(text) for text, _ in spelt]
    spaced = np.array([is_spaced for _, is_spaced in spelt], bool)
    # A segment that begins inside a word keeps [CLS] or [SEP] apart.
    spaced[masked.segments[:-1]] = True
    cls, sep = tokenizer.specials.cls, tokenizer.specials.sep
    return _View(
        tokens=_between(masked.segments, tokens, cls, sep),
        texts=_between(masked.segments, texts, cls, sep),
        spaced=_between(masked.segments, spaced.tolist(), True, True),
        spans=list(_spans(masked, tokenizer)),
    )


def _between(segments: np.ndarray, items: list, cls: object, sep: object) -> list:
    """What belongs to the text's tokens, with that of [CLS] and [SEP] among it."""
    joined = [cls]
    for begin, end in itertools.pairwise(segments.tolist()):
        joined += [*items[begin:end], sep]
    return joined


def _spans(masked: MaskedBlocks, tokenizer: Tokenizer) -> Iterator[_Span]:
    masks = masked.masks
    begins = np.flatnonzero(np.diff(masks.span_begin, prepend=-1))
    for part in np.split(np.arange(len(masks.target)), begins)[1:]:
        begin = int(masks.span_begin[part[0]])
        # Behind [CLS] and the [SEP] of a segment before its own.
        ahead = int(np.searchsorted(masked.segments, begin, side="right"))
        yield _Span(
            begin=begin + ahead,
            actions=masks.action[part].tolist(),
            became=[printable(tokenizer.tokens[i]) for i in masks.replacement[part]],
        )


def _origin(feed: Feed, piece: int) -> str:
    """Where a segment is from."""
    segments = feed.plan.segments
    start, shard = segments.start[piece], feed.split.shards[segments.shard[piece]]
    document = np.searchsorted(shard.documents, start, side="right") - 1
    first = int(start - shard.documents[document])
    return f"{shard.name} document {document:,} from token {first:,}"


def _running_text(view: _View, paint: Paint) -> list[str]:
    """The words of a block, pieces joined, each span in braces behind its number."""
    fragments = list(view.texts)
    for number, span in enumerate(view.spans, start=1):
        end = span.begin + len(span.actions)
        for place, action in zip(range(span.begin, end), span.actions, strict=True):
            fragments[place] = paint(fragments[place], ACTION_NAMES[action])
        mark = paint(f"{{{number}:", "faint")
        fragments[span.begin] = mark + fragments[span.begin]
        fragments[end - 1] += paint("}", "faint")
    words: list[str] = []
    for fragment, spaced in zip(fragments, view.spaced, strict=True):
        if spaced:
            words.append(fragment)
        else:
            words[-1] += fragment
    return words


def _describe_span(
    number: int, span: _Span, tokens: list[str], width: int, paint: Paint
) -> Iterator[str]:
    end = span.begin + len(span.actions)
    mixed = len(set(span.actions)) > 1
    label = "mixed" if mixed else _LABELS[span.actions[0]]
    style = "faint" if mixed else ACTION_NAMES[span.actions[0]]
    head = f"  {number:>4}  {span.begin:>4}  {paint(f'{label:<6}', style)}  "
    hang = " " * columns(head)
    names = [ACTION_NAMES[action] for action in span.actions]
    inside = zip(tokens[span.begin : end], names, strict=True)
    numbers = [paint(str(offset), "faint") for offset in range(1, len(names) + 1)]
    cells = [paint(token, name) for token, name in inside]
    cells = [" ".join(pair) for pair in zip(numbers, cells, strict=True)]
    cells = [f"{tokens[span.begin - 1]} |", *cells, f"| {tokens[end]}"]
    yield from wrap(cells, width, head, hang, "  ")
    if mixed or style == "random":
        now = zip(span.became, span.actions, strict=True)
        cells = ["kept" if action == KEEP else token for token, action in now]
        cells = [" ".join(pair) for pair in zip(numbers, cells, strict=True)]
        yield from wrap(["became", *cells], width, hang, hang, "  ")


def wrap(
    cells: Sequence[str], width: int, first: str, later: str, gap: str
) -> Iterator[str]:
    """Yields lines of whole cells, at most `width` columns if the cells allow it.

    Args:
        cells: text, possibly with colours, which take no columns.
        width: columns of a line.
        first: what the first line begins with.
        later: what the other lines begin with.
        gap: what stands between two cells.
    """
    line, used, empty = first, columns(first), True
    for cell in cells:
        size = columns(cell)
        if not empty and used + len(gap) + size > width:
            yield line
            line, used, empty = later, columns(later), True
        line += cell if empty else gap + cell
        used += size + (0 if empty else len(gap))
        empty = False
    yield line


def columns(text: str) -> int:
    """How many columns of a terminal a text takes; colours take none."""
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in _ESCAPE.sub("", text)
    )


def _count(things: Sized, noun: str) -> str:
    return f"{len(things):,} {noun}{'' if len(things) == 1 else 's'}"


def printable(token: str) -> str:
    """Spells out what would move the cursor, such as U+2028."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in token)
