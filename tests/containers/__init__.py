"""Build the images and run them under faults in a Docker engine of their own
(`python -m tests.containers`).
"""
