"""Exports of results to files, folders of parts, and tables in PostgreSQL.

`request` checks what is wanted, `run` reads the stream and writes to a `sink`. A sink is one
module: `files` and `postgres`. This package is not called `export`: the function `feedmill.export`
would be replaced by it.
"""
