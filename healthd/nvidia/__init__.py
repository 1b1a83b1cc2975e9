"""NVIDIA's words: codes and their texts, and NVML without GPUs."""
