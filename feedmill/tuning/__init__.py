"""The experiment of `feedmill tune`: what batch sizes, orders, precisions and each step from a
pipeline to here bring.

`trials.py` measures batches, `curve.py` names what the figures show, `ladder.py` climbs from row
by row to the queue, `precisions.py` compares data types, `profile.py` looks into a pass,
`experiment.py` runs them, `page.py` draws them.
"""
