"""Label Parquet files with Daft: `python on_daft.py POSTS OUT`.

Needs `pip install 'feedmill[worker,tables]' daft`.
"""

import sys

import daft
import pyarrow
from daft import DataType, Series

import feedmill

LABEL = DataType.struct(
    {
        "label": DataType.string(),
        "label_score": DataType.float64(),
        "label_error": DataType.string(),
    }
)


# with GPUs: gpus=1, and max_concurrency their number
@daft.cls(max_concurrency=1, use_process=False)
class Labeller:
    def __init__(self, labels: list[str]) -> None:
        self.classifier = feedmill.Classifier(labels=labels)

    @daft.method.batch(return_dtype=LABEL, unnest=True, batch_size=8192)
    def label(self, title: Series, selftext: Series) -> pyarrow.Array:
        posts = pyarrow.table(
            {"title": title.to_arrow(), "selftext": selftext.to_arrow()}
        )
        return (
            self.classifier(posts)
            .drop_columns(posts.column_names)
            .to_struct_array()
            .combine_chunks()
        )


if __name__ == "__main__":
    posts = daft.read_parquet(sys.argv[1])
    labeller = Labeller(["sports", "food"])
    posts.select("*", labeller.label(posts["title"], posts["selftext"])).write_parquet(
        sys.argv[2]
    )
