"""Examples in the documentation, run unchanged."""

import csv
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import forkserver
from tests.support import (
    ROOT,
    RedisServer,
    announced,
    feedmill,
    forks,
    run,
    running,
    wait_until,
)


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(
        r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    return [text for marked, text in found if marked == language]


#: Posts of the README's file `posts.csv`.
POSTS = "title\nI love this shop\nIt broke after a day\nWhere can I return it?\n"
#: `--json` commands whose objects docs/reference/json.md shows under these headings.
SHOWN_AS_JSON = {
    "Results": "results --run monday --limit 1 --json",
    "Status": "status --json",
    "Runs": "status --run monday --json",
    "Health": "health --json",
}


@pytest.mark.timeout(360)
def test_readme_and_tutorial_commands_run(served: RedisServer, tmp_path: Path) -> None:
    """In the order of the pages.

    Instead of `feedmill up`, a server and a worker announce themselves as one.
    """
    (tmp_path / "posts.csv").write_text(POSTS)
    # every second sample: three to eight of each topic
    samples = (ROOT / "feedmill" / "samples.jsonl").read_text().splitlines()[::2]
    titles = {json.loads(line)["title"] for line in samples}
    (tmp_path / "feedmill").mkdir()
    (tmp_path / "feedmill" / "samples.jsonl").write_text("\n".join(samples) + "\n")
    here = {"HOME": str(tmp_path)}
    with announced(
        tmp_path / ".local" / "share" / "feedmill",
        json.dumps({"redis_url": served.url}),
    ):
        for command in [
            *commands("README.md", "Your own posts and labels"),
            *commands("docs/tutorial.md"),
        ]:
            if command[-1] == "--follow":
                with running(*command, cwd=tmp_path, **here) as following:
                    wait_until(
                        lambda: following.says("It broke after a day"),
                        "the results are shown",
                    )
            elif command != ["up"]:
                said = feedmill(*command, cwd=tmp_path, **here)
                assert said.returncode == 0, f"{command}: {said.stderr}"
        for name in ("labelled.csv", "monday.csv"):
            # another page has a run of this name, too
            with (tmp_path / name).open(newline="") as file:
                labelled = [row["title"] for row in csv.DictReader(file)]
            assert sum(title in titles for title in labelled) == len(samples) == 80
        page = (ROOT / "docs" / "reference" / "json.md").read_text()
        for heading, json_command in SHOWN_AS_JSON.items():
            example = re.search(
                rf"^## {heading}\n.*?```json\n(.*?)```", page, re.MULTILINE | re.DOTALL
            )
            assert example, heading
            printed = json.loads(
                feedmill(*json_command.split(), cwd=tmp_path, **here).stdout
            )
            assert list(json.loads(example[1])) == list(printed), heading


def commands(page: str, section: str = "") -> list[list[str]]:
    """Return the arguments of each `feedmill` command in the blocks marked `sh` of a page, or of
    one section of it.
    """
    text = (ROOT / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = "".join(
        re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ).splitlines()
    found = [
        words
        for program, *words in (shlex.split(line, comments=True) for line in lines)
        if program == "feedmill"
    ]
    assert found
    return found


def test_messages_page_example_runs(served: RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / ".local" / "share" / "feedmill"
    with announced(folder, json.dumps({"redis_url": served.url})):
        address = feedmill("url", cwd=tmp_path, HOME=str(tmp_path)).stdout.strip()
    environment = os.environ | {"HOME": str(tmp_path), "FEEDMILL_REDIS_URL": address}
    said = run(
        [sys.executable, "-c", "".join(blocks("docs/messages.md", "python"))],
        tmp_path,
        environment,
    )
    assert said.stdout == "".join(blocks("docs/messages.md", "")), said.stderr


def test_readme_example_runs(served: RedisServer, tmp_path: Path) -> None:
    _, example = blocks("README.md", "python")
    (said,) = re.findall(r"# (\w+)\n$", example)
    found = run(
        [sys.executable, "-c", example],
        tmp_path,
        os.environ
        | {"FEEDMILL_REDIS_URL": served.url, "FEEDMILL_TOKEN_BUDGET": "2048"},
    )
    assert found.stdout == f"{said}\n", found.stderr


def test_python_page_examples_run(served: RedisServer, tmp_path: Path) -> None:
    """The examples of docs/python.md print what the page shows."""
    environment = os.environ | {
        "FEEDMILL_REDIS_URL": served.url, "FEEDMILL_TOKEN_BUDGET": "2048",
        "FEEDMILL_DTYPE": "float32",
    }  # fmt: skip
    said = run(
        [sys.executable, "-c", "\n".join(blocks("docs/python.md", "python"))],
        tmp_path,
        environment,
    )
    assert said.stdout == "".join(blocks("docs/python.md", "")), said.stderr
    assert "1 of 3 rows have no label: row 2: no text." in said.stderr


def test_readme_classifies_in_three_lines(tmp_path: Path) -> None:
    example, _ = blocks("README.md", "python")
    code = (
        example.replace("feedmill.classify(", "print(feedmill.classify(").rstrip() + ")"
    )
    said = run(
        [sys.executable, "-c", code],
        tmp_path,
        os.environ | {"FEEDMILL_TOKEN_BUDGET": "2048"},
    )
    assert said.stdout.startswith("2 predictions: praise 1, complaint 1\n"), said.stderr


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=150, kernel_name="forked").execute()
nbformat.write(notebook, "done.ipynb")
"""


def test_notebook_runs(tmp_path: Path) -> None:
    """The notebook of docs/examples, in a real kernel with its event loop."""
    path = ROOT / "docs" / "examples" / "classify.ipynb"
    saved = json.loads(path.read_text())
    assert not any(
        cell.get("outputs") or cell.get("execution_count") for cell in saved["cells"]
    )
    forks()  # start the fork server, which has imported what the kernel needs
    command = [
        sys.executable,
        forkserver.__file__,
        "-u",
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ]
    kernel = tmp_path / "kernels" / "forked"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "forked"})
    )
    folders = dict.fromkeys(("IPYTHONDIR", "JUPYTER_PATH", "HOME"), str(tmp_path))
    environment = os.environ | {"FEEDMILL_TOKEN_BUDGET": "2048"} | folders
    said = run([sys.executable, "-c", EXECUTE, str(path)], tmp_path, environment)
    assert (tmp_path / "done.ipynb").exists(), said.stderr
    cells = [
        cell["outputs"]
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        if "outputs" in cell
    ]
    texts = [
        [
            "".join(each.get("text", each.get("data", {}).get("text/plain", "")))
            for each in cell
        ]
        for cell in cells
    ]
    noisy = {
        place
        for place, cell in enumerate(cells)
        for each in cell
        if each.get("name") == "stderr"
    }
    assert noisy == {3}, cells  # the progress bar
    first, frame, mean, (*bars, counts), awaited, figures, mistake = texts
    assert first[0].startswith("2 predictions: praise 1, complaint 1\n  praise ")
    assert "score_complaint" in frame[0]
    assert "complaint    1.0" in mean[0]
    assert "100/100" in "".join(bars)
    assert "sports" in counts
    assert awaited == ["'music'"]
    assert re.search(r"size .*memory_mb", figures[0])
    assert [line.split()[1] for line in figures[0].splitlines()[1:]] == [
        "5",
        "10",
        "20",
    ]
    assert mistake[0].startswith(
        "labels must be a list such as ['praise', 'complaint']"
    )


def test_celery_page_custom_task_runs(served: RedisServer, tmp_path: Path) -> None:
    """Run the task declared in docs/celery.md in this process."""
    _, declared = blocks("docs/celery.md", "python")
    posts = [{"id": "a", "title": "The keeper saved two penalties"}]
    said = run(
        [
            sys.executable,
            "-c",
            (
                f"{declared}\nprint(careful.max_retries, careful(posts={posts!r})[0]['label'])"
            ),
        ],
        tmp_path,
        os.environ
        | {"FEEDMILL_REDIS_URL": served.url, "FEEDMILL_TOKEN_BUDGET": "2048"},
    )
    assert said.stdout == "3 sports\n", said.stderr


def test_tests_named_in_security_page_exist() -> None:
    named = re.findall(
        r"`(tests/[a-z0-9_/]+\.py)(?:::(\w+))?`",
        (ROOT / "docs" / "security.md").read_text(),
    )
    assert len(named) > 10
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test
