"""Label Parquet files with Spark: `python on_spark.py POSTS OUT`.

Needs feedmill[worker] and pyspark[sql].

Each Python worker of Spark holds a model, with OMP_NUM_THREADS threads, which Spark sets to
`spark.task.cpus`.
"""

import sys
import warnings
from collections.abc import Iterator

import pyarrow
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import feedmill


def label(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    warnings.filterwarnings(
        "ignore", message=".* have no label"
    )  # the column label_error says it
    for batch in batches:
        yield from feedmill.classify(
            batch, labels=["sports", "food"], device="cpu"
        ).to_batches()


if __name__ == "__main__":
    spark = SparkSession.builder.config(
        "spark.sql.execution.arrow.maxRecordsPerBatch", 8192
    ).getOrCreate()
    posts = spark.read.parquet(sys.argv[1])
    columns = StructType([*posts.schema.fields])
    columns.add("label", "string").add("label_score", "double").add(
        "label_error", "string"
    )
    posts.mapInArrow(label, columns).write.parquet(sys.argv[2])
