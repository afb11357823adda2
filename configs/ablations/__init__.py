"""The paper's ablations: one recipe a row, one line from its parent.

    single_sbo (base.py) -> single -> pairs_nsp (span) -> subword, word, entity,
                                                          noun_phrase
                         -> sbo_left, sbo_right, sbo_internal

As far as the tables of Joshi et al. 2019 (arXiv:1907.10529) show: Table 7 compares
formats and auxiliary objectives under span masking (pairs_nsp, single, single_sbo);
Table 6 compares masking schemes, all on pairs with NSP, so that its geometric spans are
Table 7's pairs with NSP. The sbo_* recipes are ours, for what the paper leaves open.

They have the size and the schedule of configs/base.py and are to be compared with each
other; for another size give every row the same --config.model and --config.train
settings.
"""
