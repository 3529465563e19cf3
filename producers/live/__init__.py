"""A framework for daemons that follow a source: position, each post once, purges, gaps, backoff, status, metrics.

Read in this order: `source.py` (what a source implements), `daemon.py` (the loop), `state.py` (state in Redis). Sources
are `producers/bluesky.py`, `producers/reddit/source.py` and docs/examples/extending/hacker_news.py.
"""
