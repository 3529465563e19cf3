"""Benchmarks. Each compares its variants side by side in one run; tests never assert timings."""
