"""A pack's name -> its samples: read at their place, decoded, tokenized, compared with what was planned."""
