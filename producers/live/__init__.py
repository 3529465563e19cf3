"""A framework for daemons that follow a source: positions, each post once, purges, rechecks, gaps,
backoff, metrics.

Read in this order: `source.py` (what a source implements), `daemon.py` (the loop), `state.py`
(state in Redis). Sources are `producers/bluesky.py`, `producers/hacker_news.py`,
`producers/feeds/source.py` and `producers/reddit/source.py`.
"""
