"""One computed study, rendered as JSON, Markdown, figures and one HTML page."""
