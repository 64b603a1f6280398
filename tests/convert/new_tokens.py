"""Entries of a file of tokens to add, of every kind that is accepted."""

# A special token, a word, one that begins with a space, one in another script with a space in it,
# one with a line feed, one with a letter that names a byte, and one that holds a special token.
NEW = (
    {"token": "<|tool|>", "special": True},
    "Nebuchadnezzar",
    {"token": " Jeremiah", "pieces": [" the", " of"], "weights": [1, 3]},
    {"token": "東 京", "pieces": [5]},
    "end\n",
    " café",
    {"token": "<|a|>b<|im_end|>", "special": True},
)
