"""Reddit as a live source, by API or archive, and one-time snapshots of its listings.

Read in this order: `listing.py` (walks from the newest post down to the watermark), `source.py`
(polls, and the state in Redis), `client.py` (the only module that uses PRAW).
"""
