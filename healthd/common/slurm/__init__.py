"""Slurm's formats: commands, tables, host lists, reasons."""
