"""This machine: its files, programs, processes, disks and devices."""
