"""Packs from a stream that is not measured first: a bounded buffer, with a state that is saved and resumed."""
