"""Access to this machine: files, programs, processes, disks and devices."""
