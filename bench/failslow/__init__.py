"""The benchmark of `healthd failslow`.

- generate makes sets of series with known faults.
- baselines has plain BOCD and a sliding window.
- score counts which faults are found, missed and blamed on the right component.
- alibaba reads a public trace.
- cost measures time and memory.
"""
