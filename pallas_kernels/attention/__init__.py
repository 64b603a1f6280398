"""What the attention operations share.

cut.py       how work is cut in tiles of queries and tokens
heads.py     the heads and dtypes that their kernels take
rows.py      loading and storing rows inside a kernel
scales.py    what int8 codes of keys and values stand for
softmax.py   the online softmax
tiles.py     attention of a tile of queries, inside a kernel
"""
