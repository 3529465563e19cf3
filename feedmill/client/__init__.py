"""Clients of the HTTP endpoint of `feedmill web`: `feedmill.Client` and `feedmill.AsyncClient`.

`wire.py` forms requests and reads answers, `failures.py` reads errors and decides what to repeat.
`aio.py` has the asynchronous client, and `sync.py` runs it for callers without an event loop.
"""
