"""A study or a run -> JSON, Markdown, figures and HTML pages."""
