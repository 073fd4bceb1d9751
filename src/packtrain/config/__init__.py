"""Settings: what keys there are, YAML and other systems' configs in, checked sections and datasets' settings out."""
