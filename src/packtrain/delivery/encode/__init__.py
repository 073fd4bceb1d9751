"""The number of a pack -> its encoded samples: read, decoded, tokenized, and compared with what was planned."""
