"""From costs to a decision: the sweep over lengths, padding beside packing, the recommendation."""
