"""Label a folder of zstd JSON lines, such as Reddit's dumps, with Ray Data: a folder of Parquet
files for each of them.

    python on_ray.py DUMPS OUT --devices 8 --gpus 1

Needs `pip install 'feedmill[worker,dumps,tables]' 'ray[data]'` on every node. All nodes must see
DUMPS and OUT under these paths. OUT/NAME appears once all rows of DUMPS/NAME are written, and a
rerun skips it. Exits 1 if a dump could not be read to its end.
"""

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from uuid import uuid4

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import ray

import feedmill
from feedmill.producers.files import decompressed

LABELS = ["sports", "food", "technology", "politics"]
#: Fields of a record to copy, all as text.
FIELDS = ("id", "title", "selftext", "subreddit", "created_utc")
SCHEMA = pyarrow.schema(
    [
        ("file", pyarrow.string()),
        ("line", pyarrow.int64()),
        *((name, pyarrow.string()) for name in FIELDS),
    ]
)
#: Rows read at once; bytes of a block, about 8,000 posts, which an actor sorts by length; and rows
#: of a GPU's batch.
READ_ROWS, BLOCK_BYTES, GPU_ROWS = 2_000, 4 << 20, 8_192


def lines(dump: Path) -> Iterator[dict[str, object]]:
    """Yield a row for each line.

    One that is not an object of JSON has no text, so that its label is null.
    """
    with dump.open("rb") as packed, ExitStack() as opened:
        for number, line in enumerate(decompressed(packed, dump.name, opened), 1):
            row: dict[str, object] = {"file": dump.name, "line": number}
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                texts = {
                    name: str(record[name])
                    for name in FIELDS
                    if isinstance(record.get(name), str | int)
                }
                # Arrow refuses half of a surrogate pair.
                row |= {
                    name: text.encode(errors="replace").decode()
                    for name, text in texts.items()
                }
            yield row


def read(dumps: pyarrow.Table, parts: Path) -> Iterator[pyarrow.Table]:
    """Yield the rows of dumps. At the end of each, write how many there are to parts/NAME.rows."""
    for dump in map(Path, dumps["item"].to_pylist()):
        rows, count = lines(dump), 0
        try:
            while some := list(islice(rows, READ_ROWS)):
                count += len(some)
                yield pyarrow.Table.from_pylist(some, SCHEMA)
        except (OSError, EOFError) as error:  # the other dumps go on
            print(f"{dump}: {error}")
        else:
            (parts / f"{dump.name}.rows").write_text(str(count))
    yield SCHEMA.empty_table()  # of a task without rows


def write(table: pyarrow.Table, parts: Path) -> pyarrow.Table:
    """Write a block, and return how many rows of each dump it has.

    A repeated task writes the same files again.
    """
    counts = []
    for name in table["file"].unique().to_pylist():
        part = table.filter(pyarrow.compute.equal(table["file"], name)).drop_columns(
            "file"
        )
        (parts / name).mkdir(exist_ok=True)
        target = parts / name / f"{part['line'][0].as_py():012}.parquet"
        temporary = target.with_suffix(f".{uuid4().hex}")
        pyarrow.parquet.write_table(part, temporary, compression="zstd")
        temporary.rename(target)
        counts.append(
            {"file": name, "rows": len(part), "unlabelled": part["label"].null_count}
        )
    return pyarrow.Table.from_pylist(counts)


def labelled(
    dumps: list[Path], parts: Path, devices: int, gpus: int
) -> Iterator[dict[str, object]]:
    """Classify and write all rows.

    Yield the file, rows and unlabelled rows of each part that is written.
    """
    ray.init()  # the cluster at RAY_ADDRESS, or this machine
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = BLOCK_BYTES
    context.max_consecutive_actor_init_deaths = (
        1  # a lost node may have been loading the model
    )
    items = ray.data.from_items(
        [str(dump) for dump in dumps], override_num_blocks=len(dumps)
    )
    # With as many CPUs as an actor, Ray would read within the actors, which then compute less.
    rows = items.map_batches(
        partial(read, parts=parts), batch_size=1, batch_format="pyarrow", num_cpus=0.5
    )
    posts = rows.map_batches(
        feedmill.Classifier,
        fn_constructor_kwargs={"labels": LABELS, "device": "cuda" if gpus else "cpu"},
        compute=ray.data.ActorPoolStrategy(
            size=devices,
            # the device computes a block while another one is prepared
            max_concurrent_calls_per_actor=2,
            enable_true_multi_threading=True,
        ),
        num_gpus=gpus or None,
        batch_size=GPU_ROWS
        if gpus
        else None,  # a whole block, which Ray refuses with GPUs
        batch_format="pyarrow",
    )
    yield from posts.map_batches(
        partial(write, parts=parts), batch_size=None, batch_format="pyarrow"
    ).iter_rows()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dumps", type=Path, metavar="DUMPS")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help=("actors: one for each GPU, or one for each CPU node"),
    )
    parser.add_argument("--gpus", type=int, default=0, help="1 gives each actor a GPU")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    for unfinished in out.glob(".parts-*"):
        shutil.rmtree(unfinished)
    parts = out / f".parts-{uuid4().hex}"  # no task of an earlier run writes to it
    parts.mkdir(parents=True)
    dumps = [
        path
        for path in sorted(arguments.dumps.absolute().glob("*.zst"))
        if not (out / path.name).exists()
    ]
    written, unlabelled = Counter[str](), Counter[str]()

    def finish(name: str) -> None:
        """Give a dump's folder its name once it has all rows."""
        total = parts / f"{name}.rows"
        if (
            not (out / name).exists()
            and total.exists()
            and int(total.read_text()) == written[name]
        ):
            (parts / name).mkdir(exist_ok=True)  # of a dump without rows
            (parts / name).rename(out / name)
            print(
                f"{name}: {written[name]:,} rows, {unlabelled[name]:,} without a label",
                flush=True,
            )

    for part in (
        labelled(dumps, parts, arguments.devices, arguments.gpus) if dumps else ()
    ):
        written[part["file"]] += part["rows"]
        unlabelled[part["file"]] += part["unlabelled"]
        finish(part["file"])
    for dump in dumps:
        finish(dump.name)
    shutil.rmtree(parts)
    if missing := [dump.name for dump in dumps if not (out / dump.name).exists()]:
        raise SystemExit(f"not read to the end: {', '.join(missing)}")


if __name__ == "__main__":
    main()
