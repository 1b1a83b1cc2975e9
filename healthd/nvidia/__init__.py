"""NVIDIA GPUs: tables of codes, NVML, and fake machines."""
