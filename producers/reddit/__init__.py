"""Read posts from Reddit: a daemon that follows new posts without missing any, and a one-time snapshot of listings.

Read in this order: `walk.py` (from the newest post down to known posts), `daemon.py` (the loop around it), `state.py`
(state in Redis), `client.py` (the only module that uses PRAW).
"""
