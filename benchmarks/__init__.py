"""What is measured, against what, side by side in one run. Tests never assert times; this is where they live."""
