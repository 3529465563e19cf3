"""Measure models' accuracy, calibration and throughput on posts with known labels."""
