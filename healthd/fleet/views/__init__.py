"""Views of the answers: how each is described for a terminal and for the report, `view(document) -> View`."""
