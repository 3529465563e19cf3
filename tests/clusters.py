"""Run the programs of docs/clusters.md: `python -m tests.clusters [ray memory daft dask spark]`.

Spark needs Java.

Ray runs on two nodes; an actor is killed, then the program, and a second run continues. `memory`
labels ten times as many posts as an actor holds. Exits with a traceback if a row is missing,
doubled or without its label, if the second run repeats a dump, or if an actor's memory grows with
the dump.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import zstandard
from pyarrow import parquet

from benchmarks.running import family
from feedmill.stack.demo import sample_posts
from tests.fakes.models import make_sentence_model
from tests.support import ROOT, wait_until

#: Dumps, and rows of each. Every hundredth row has no text.
NAMES, ROWS = [f"RS_{number}.zst" for number in range(6)], 1000
TEXTS = [{"title": post.title, "selftext": ""} for post in sample_posts()] * 10
POSTS = [
    {"id": str(at), **(TEXTS[at] if at % 100 else dict.fromkeys(TEXTS[0]))}
    for at in range(1, ROWS + 1)
]


def command(program: str, *arguments: object) -> list[str]:
    return [
        sys.executable,
        str(ROOT / f"docs/examples/clusters/on_{program}.py"),
        *map(str, arguments),
    ]


def check(folder: Path, column: str) -> None:
    """Compare a folder of Parquet files with POSTS. column: the one that numbers them."""
    table = parquet.read_table(folder)
    assert sorted(map(int, table[column].to_pylist())) == list(range(1, ROWS + 1)), (
        folder
    )
    outcomes = Counter(
        zip(
            table["label"].is_valid().to_pylist(),
            table["label_error"].to_pylist(),
            strict=True,
        )
    )
    assert outcomes == {
        (True, ""): ROWS - ROWS // 100,
        (False, "no text"): ROWS // 100,
    }, folder


def actors() -> set[int]:
    """Return the ids of the actors' processes that this process started, or one that it
    started.
    """
    command = r"pgrep -f '^ray::MapWorker\(MapBatches\(Classifier'"
    titled = subprocess.getoutput(command).split()  # noqa: S605
    return set(map(int, titled)) & set(family(os.getpid()))


def private_megabytes(pid: int) -> float:
    """Return a process's memory without the pages of Ray's object store, which is shared and has a
    limit of its own.
    """
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / 2**20


def on_ray(dumps: Path, out: Path) -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - the other programs run without Ray

    lines = [
        json.dumps(post).encode() if post["title"] else b"[" * 100_000 for post in POSTS
    ]
    lines[0] = json.dumps(POSTS[0] | {"selftext": "\ud800"}).encode()
    frames = [
        zstandard.ZstdCompressor().compress(b"\n".join([*some, b""]))
        for some in (lines[:500], lines[500:], [])
    ]
    for name in NAMES:
        (dumps / name).write_bytes(frames[0] + frames[1])
    (dumps / "empty.zst").write_bytes(frames[2])
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args=node | {"include_dashboard": False}
    )
    cluster.add_node(**node)
    start, environment = (
        command("ray", dumps, out, "--devices", 2),
        os.environ | {"RAY_ADDRESS": cluster.address},
    )
    try:
        run = subprocess.Popen(start, env=environment)
        wait_until(
            lambda: len(actors()) == 2 and any(out.glob("RS_*")),
            ("both actors run and a dump is written"),
        )
        os.kill(min(actors()), 9)
        count = len(list(out.glob("RS_*")))
        wait_until(
            lambda: len(list(out.glob("RS_*"))) > count, "another dump is written"
        )
        run.kill()
        run.wait()
        before = {path: path.stat().st_mtime_ns for path in out.glob("RS_*/*")}
        logging.info(
            "killed an actor, then the program after %d of %d dumps",
            len(before),
            len(NAMES),
        )
        (dumps / "cut.zst").write_bytes(frames[0][:-9])
        assert [
            subprocess.run(start, env=environment, check=False).returncode
            for _ in range(2)
        ] == [1, 1]
        assert before == {path: path.stat().st_mtime_ns for path in before}, (
            "a dump was repeated"
        )
        assert {path.name for path in out.iterdir()} == {*NAMES, "empty.zst"}
    finally:
        cluster.shutdown()
    for name in NAMES:
        check(out / name, "line")


def memory(dumps: Path, out: Path) -> None:
    model = make_sentence_model(dumps / "model")
    lines = [
        json.dumps({"title": f"post {at}", "selftext": "word " * (at % 3200)}).encode()
        for at in range(40_000)
    ]
    (dumps / "posts.zst").write_bytes(
        zstandard.ZstdCompressor().compress(b"\n".join(lines))
    )
    environment = os.environ | {"RAY_ADDRESS": "local", "FEEDMILL_MODEL": str(model)}
    run = subprocess.Popen(command("ray", dumps, out), env=environment)
    #: Pairs of blocks written and the actor's megabytes.
    samples: list[tuple[int, float]] = []
    while run.poll() is None:
        time.sleep(0.1)
        blocks = len([*out.rglob("*.parquet")])
        with suppress(OSError):  # the actor has ended
            samples += [(blocks, private_megabytes(pid)) for pid in actors() if blocks]
    assert run.returncode == 0
    blocks = len([*out.rglob("*.parquet")])
    early = max(size for written, size in samples if written <= blocks / 4)
    logging.info(
        "largest memory of the actor: %.0f MB up to block %d", early, blocks // 4
    )
    late = max(size for _, size in samples)
    logging.info("largest memory of the actor: %.0f MB up to block %d", late, blocks)
    assert late < 1.2 * early  # 1.7 if the texts of all blocks stayed
    assert blocks >= 80


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    for program in sys.argv[1:] or ["ray", "memory", "daft", "dask", "spark"]:
        with TemporaryDirectory(prefix="mill-") as folder:
            given, written = Path(folder) / "in", Path(folder) / "out"
            given.mkdir()
            if program in ("ray", "memory"):
                {"ray": on_ray, "memory": memory}[program](given, written)
            else:
                for part in (0, 1):
                    parquet.write_table(
                        pyarrow.Table.from_pylist(POSTS[part::2]),
                        given / f"{part}.parquet",
                    )
                subprocess.run(command(program, given, written), check=True)
                check(written, "id")
        logging.info("%s: passed", program)
