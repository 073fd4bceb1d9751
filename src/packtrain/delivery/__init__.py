"""Packs -> batches: samples encoded, collated, and handed out in the order of a schedule, exactly resumable."""
