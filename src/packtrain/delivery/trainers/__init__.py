"""What a trainer of one's own needs for packs: loss over tokens, evaluation, ranks that watch each other."""
