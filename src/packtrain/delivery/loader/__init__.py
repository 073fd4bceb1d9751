"""From packed rows to the tensors of a batch: collators, the loader and its state."""
