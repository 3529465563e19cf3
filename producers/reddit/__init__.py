"""Reddit as a live source, by API or archive, and one-time snapshots of its listings.

Read in this order: `walk.py` (from the newest post down to known posts), `source.py` (polls and their failures),
`state.py` (state in Redis), `client.py` (the only module that uses PRAW).
"""
