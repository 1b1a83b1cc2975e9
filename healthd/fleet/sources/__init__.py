"""From what others write to rows of a table, one source a file."""
