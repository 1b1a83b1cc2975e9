"""Views of the answers, for the terminal and the report: `view(document) -> View`."""
