"""Run the programs of docs/clusters.md: `python -m tests.clusters [ray daft dask spark]`. Spark needs Java.

Ray runs on two nodes; an actor is killed, then the program, and a second run continues. Exits with a traceback if a row
is missing, doubled or without its label, or if the second run repeats a dump.
"""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import zstandard
from pyarrow import parquet

from feedmill.stack.demo import sample_posts
from tests.support import ROOT, wait_until

#: Dumps, and rows of each. Every hundredth row has no text.
NAMES, ROWS = [f"RS_{number}.zst" for number in range(6)], 1000
TEXTS = [{"title": post.title, "selftext": ""} for post in sample_posts()] * 10
POSTS = [{"id": str(at), **(TEXTS[at] if at % 100 else dict.fromkeys(TEXTS[0]))} for at in range(1, ROWS + 1)]


def command(program: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / f"docs/examples/clusters/on_{program}.py"), *map(str, arguments)]


def check(folder: Path, column: str) -> None:
    """Compare a folder of Parquet files with POSTS. column: the one that numbers them."""
    table = parquet.read_table(folder)
    assert sorted(map(int, table[column].to_pylist())) == list(range(1, ROWS + 1)), folder
    outcomes = Counter(zip(table["label"].is_valid().to_pylist(), table["label_error"].to_pylist(), strict=True))
    assert outcomes == {(True, ""): ROWS - ROWS // 100, (False, "no text"): ROWS // 100}, folder


def on_ray(dumps: Path, out: Path) -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - the other programs run without Ray

    lines = [json.dumps(post).encode() if post["title"] else b"no JSON" for post in POSTS]
    frames = [zstandard.ZstdCompressor().compress(b"\n".join([*some, b""])) for some in (lines[:500], lines[500:], [])]
    for name in NAMES:
        (dumps / name).write_bytes(frames[0] + frames[1])
    (dumps / "empty.zst").write_bytes(frames[2])
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    nodes = cluster.head_node, cluster.add_node(**node)
    raylets = ",".join(str(each.all_processes["raylet"][0].process.pid) for each in nodes)
    start, environment = command("ray", dumps, out, "--devices", 2), os.environ | {"RAY_ADDRESS": cluster.address}

    def actors() -> list[int]:
        pattern = r"^ray::MapWorker\(MapBatches\(Classifier"
        return [*map(int, subprocess.getoutput(f"pgrep -P {raylets} -f '{pattern}'").split())]  # noqa: S605 - as written

    try:
        run = subprocess.Popen(start, env=environment)
        wait_until(lambda: len(actors()) == 2 and any(out.glob("RS_*")), "both actors run and a dump is written")
        os.kill(actors()[0], 9)
        count = len(list(out.glob("RS_*")))
        wait_until(lambda: len(list(out.glob("RS_*"))) > count, "another dump is written")
        run.kill()
        run.wait()
        before = {path: path.stat().st_mtime_ns for path in out.glob("RS_*/*")}
        logging.info("killed an actor, then the program after %d of %d dumps", len(before), len(NAMES))
        (dumps / "cut.zst").write_bytes(frames[0][:-9])
        assert [subprocess.run(start, env=environment, check=False).returncode for _ in range(2)] == [1, 1]
        assert before == {path: path.stat().st_mtime_ns for path in before}, "a dump was repeated"
        assert {path.name for path in out.iterdir()} == {*NAMES, "empty.zst"}
    finally:
        cluster.shutdown()
    for name in NAMES:
        check(out / name, "line")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    for program in sys.argv[1:] or ["ray", "daft", "dask", "spark"]:
        with TemporaryDirectory(prefix="mill-") as folder:
            given, written = Path(folder) / "in", Path(folder) / "out"
            given.mkdir()
            if program == "ray":
                on_ray(given, written)
            else:
                for part in (0, 1):
                    parquet.write_table(pyarrow.Table.from_pylist(POSTS[part::2]), given / f"{part}.parquet")
                subprocess.run(command(program, given, written), check=True)
                check(written, "id")
        logging.info("%s: passed", program)
