"""The `feedmill` command: one module per command or group of commands, and the options
they share.
"""
