"""What differs between model families: rules for media, chat templates, batch contracts, tiny models."""
