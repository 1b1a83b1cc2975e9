"""Rules that recognise kernel messages about hardware, one file per family."""
