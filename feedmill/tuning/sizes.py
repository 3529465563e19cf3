"""Batch sizes in arrival order, and their limits.

Independent of torch, so that the command line can check them.
"""

#: Posts a batch, as people try them by hand.
ARRIVAL_SIZES = tuple(range(5, 45, 5))
#: The largest size that may be asked for, and how many sizes.
MAX_ARRIVAL_SIZE = 4096
MAX_SIZES = 64
