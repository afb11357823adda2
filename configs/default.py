"""Every knob, with its unit and its reason. Not a recipe: it names no corpus.

The values are SpanBERT's (Joshi et al. 2019) at BERT-base size; the other files differ
from them only where their name says so.

Command: python -m spanbert_jax.main --config=configs/default.py \
    --config.data.corpus=DIR --workdir=RUN
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """All settings."""
    config = ConfigDict()

    # Weights to start from, with a new schedule: a run (or its checkpoints/N) or an
    # export of this program, a Hugging Face BERT (directory or file), a reference
    # SpanBERT (model.pt), a TensorFlow BERT checkpoint. "" = random ones.
    config.init_from = ""
    config.init_max_new = 0.05  # share of the encoder's tensors that it may lack

    config.train = train = ConfigDict()
    train.steps = 2_400_000  # optimiser updates; the schedule ends here
    train.stop_after = 0  # stop with a save after this step; 0 = at train.steps
    train.batch_size = 256  # rows of data.block_length, over all devices
    train.accumulation = 1  # microbatches per update: less memory, same objective
    train.seed = 0  # of parameters, dropout, row order and masks
    train.log_every = 100  # steps between lines of metrics.jsonl
    # FLOP/s that a device can do at its best, for the utilisation in the metrics; 0 =
    # what spanbert_jax/training/chips.py says of its kind in bfloat16, if anything.
    train.peak_flops = 0.0
    train.eval_every = 10_000  # steps between evaluations; 0 = only the last step

    config.data = data = ConfigDict()
    # Directory made by spanbert_jax.prepare, or "embedded"; several: commas between.
    data.corpus = ""
    data.weights = ""  # of several corpora, such as "0.7,0.3"; "" = 1 for each
    # What weights mean: "epochs", how often each corpus is read; "shares", its share of
    # the rows.
    data.weighting = "epochs"
    data.block_length = 512  # tokens of a row, with [CLS] and [SEP]
    data.packing = False  # several blocks a row: up to 1.5 times the tokens a step
    # [CLS] A [SEP] B [SEP], half of the B from another document, as BERT; for nsp.
    data.pairs = False
    # What is masked at a time: span, word or subword; entity or noun_phrase take a
    # corpus with tags.
    data.masking = "span"
    # What one 80/10/10 draw covers: span, word or token. "scheme": a token if masking
    # is word or subword, as in BERT, else a span, as in SpanBERT.
    data.replacement = "scheme"
    data.mask_ratio = 0.15  # share of a block's tokens to predict
    data.span_p = 0.2  # of the geometric distribution of span lengths
    data.max_span_words = 10  # renormalised over 1..this; longer tags are passed over
    data.max_tries = 64  # draws of a start for a span before the rest stays unused
    data.tag_share = 0.5  # share of draws that take a tag; entity, noun_phrase
    data.mask_share = 0.8  # share of draws that put [MASK]
    data.random_share = 0.1  # share that puts random tokens; the rest is kept
    # Odds of random tokens: "uniform", as in BERT; "corpus", as frequent as they are in
    # the training text, as in the reference.
    data.random_tokens = "uniform"
    data.eval_seed = 1_000  # of the held-out masks, the same for every train.seed
    data.workers = 2  # batches made at a time; changes no batch
    # Directory for plans and compiled programs; "" = spanbert_jax in the user's cache.
    data.cache = ""

    config.eval = ConfigDict()
    config.eval.max_blocks = 0  # held-out blocks of a corpus, a seeded subset; 0 = all

    config.model = model = ConfigDict()
    model.num_layers = 12
    model.hidden_size = 768
    model.num_heads = 12  # divides hidden_size; 64 a head in BERT
    model.intermediate_size = 3072  # 4 times hidden_size in BERT
    model.max_positions = 512  # at least data.block_length
    model.type_vocab_size = 2  # as BERT; single sequences use the first only
    model.dropout = 0.1  # on embeddings and sublayer outputs
    model.attention_dropout = 0.1  # on attention probabilities, likewise
    model.dtype = "float32"  # of the computation, or bfloat16; parameters are float32
    # "plain" runs anywhere; "cudnn" on NVIDIA GPUs, in bfloat16; "splash" on TPUs, for
    # rows of a multiple of 128 tokens. The latter two know no attention_dropout.
    model.attention = "plain"
    # What the backward pass computes again: "none"; "full", all of a layer: least
    # memory, a third more time; "dots", all but its products with weights.
    model.remat = "none"
    # Layers in the body of the compiled loop over them: fewer compile faster. On a CPU
    # all of them are a few percent faster than one.
    model.unroll = 1

    config.sbo = sbo = ConfigDict()
    sbo.weight = 1.0  # lambda of the loss; 0 = no SBO head
    sbo.positions = 20  # rows of the position table; the reference's runs use 15
    sbo.position_size = 200  # width of the position table
    sbo.edges = "use"  # [CLS], [SEP] as boundaries; "skip": no SBO there (reference)
    sbo.boundaries = "both"  # whose states are read: both (paper), left, right
    sbo.internal = False  # True: the span's own first and last token, x_s and x_e
    sbo.depth = 2  # dense layers, each with GeLU and LayerNorm; the paper has two

    config.nsp = ConfigDict()
    config.nsp.weight = 1.0  # of next-sentence prediction; pairs only, 0 = no head

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 1e-4  # peak
    optimizer.warmup_steps = 10_000  # updates up to the peak; linear decay follows
    optimizer.end_learning_rate = 0.0  # at train.steps
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.999
    optimizer.epsilon = 1e-8
    optimizer.weight_decay = 0.1  # paper; the reference's launch line has 0.01
    optimizer.clip_norm = 1.0  # of the global gradient (reference); 0 = off

    # Devices along each axis; -1 = as many as the others leave, for one of them.
    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # share the rows of a batch
    mesh.fsdp = 1  # share the rows, and the parameters and the optimiser's state
    mesh.tensor = 1  # share heads, feed-forward layers and the vocabulary

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 10_000  # steps
    config.checkpoint.keep = 3  # newest ones kept

    return config.lock()  # a recipe may change settings, not add any
