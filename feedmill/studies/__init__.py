"""Studies: label whole dumps, and describe the result by the posts' own time.

A study stands on the model and the outcomes of `feedmill classify` (feedmill/offline) and on the
columns, the parts and the lock of exports (feedmill/exporting).
"""
