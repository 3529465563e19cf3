"""A framework for daemons that follow a source: positions, each post once, purges, rechecks, gaps, backoff, metrics.

Read in this order: `source.py` (what a source implements), `daemon.py` (the loop), `state.py` (state in Redis). Sources
are `producers/bluesky.py`, `producers/reddit/source.py` and docs/examples/extending/hacker_news.py.
"""
