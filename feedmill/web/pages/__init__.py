"""The pages for people: the stream of posts, runs, and the state of the system.

`frame.py` is what all pages share. Each other module is a page, or a part of one.
"""
