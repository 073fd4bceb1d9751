"""Models made ready for packs: loading, trainable parts, attention, chunked loss, compiled layers, export."""
