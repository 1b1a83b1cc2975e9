"""The programs that measure, one a file: what is called, and what its output says. None is a dependency."""
