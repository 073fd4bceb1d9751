"""What the user has -> records: file formats, chat schemas, media headers, archives, mixtures."""
