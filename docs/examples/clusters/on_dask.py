"""Label Parquet files with Dask: `python on_dask.py POSTS OUT`.

Needs `pip install 'feedmill[worker]' 'dask[dataframe]'`. All threads of a process use one model.
"""

import sys

import dask.dataframe

import feedmill

NEW = {"label": "string", "label_score": "float64", "label_error": "string"}

if __name__ == "__main__":
    posts = dask.dataframe.read_parquet(sys.argv[1])
    meta = posts.dtypes.to_dict() | NEW
    labelled = posts.map_partitions(
        feedmill.classify, labels=["sports", "food"], device="cpu", meta=meta
    )
    labelled.to_parquet(sys.argv[2], write_index=False)
