"""Posts from Reddit: a daemon that misses none, and one pass over the listings.

Read in this order: `walk.py` (from the newest post down to those that are known), `daemon.py` (the loop around it),
`state.py` (what outlives the process), `client.py` (PRAW, the only file that knows it).
"""
