"""Every command that the documentation shows is one that there is, and a test runs it.

Shown are lines of blocks marked `sh`, which must be whole, and code within the text, which may leave arguments out.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from feedmill.cli import app
from tests.unit.test_images import accept

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FEEDMILL: Any = get_command(app)
#: What starts `feedmill`, named as a word of theirs, somewhere else.
LAUNCHERS = ("docker", "kubectl", "torchrun")
#: What the parser calls it where an argument, a flag's value or all but the program is left out.
LEFT_OUT = ("MissingParameter", "BadOptionUsage", "NoArgsIsHelpError")
#: Which test runs a command with these flags, as a process or through its parser; after it, what of the same file it
#: runs it by. Below tests/.
RUN_BY = {
    "--help": "e2e/test_commands.py test_prints_version_and_help",
    "classify": "e2e/test_models.py test_classify_a_text",
    "classify --classifier --labels": "e2e/test_extending.py test_custom_classifier_classifies",
    "classify --labels": "e2e/test_models.py test_classify_a_file",
    "classify --labels --model": "e2e/test_models.py test_classify_a_file",
    "classify --limit": "e2e/test_models.py test_classify_a_file",
    "dead drop": "e2e/test_dead_commands.py test_drop_requires_unique_ids_or_yes run",
    "dead list": "e2e/test_dead_commands.py test_list_and_show run",
    "dead retry": "e2e/test_dead_commands.py test_retry_accepts_post_ids run",
    "dead retry --all": "e2e/test_dead_commands.py test_retry_all_reports_letters_that_cannot_be_resent run",
    "dead show": "e2e/test_dead_commands.py test_list_and_show run",
    "demo": "e2e/test_demo.py test_interrupted_startup_leaves_no_process",
    "demo --keep": "e2e/test_demo.py test_demo_ignores_packages_named_like_ours",
    "deploy": "e2e/test_deploy.py test_deploy_switches_the_worker_and_is_reported",
    "deploy --own": "e2e/test_deploy.py test_new_workers_load_the_deployed_model_or_fail",
    "deploy --own --queue": "e2e/test_deploy.py test_mistakes_are_one_line_that_names_the_argument",
    "deploy --show": "e2e/test_deploy.py test_deploy_switches_the_worker_and_is_reported",
    "enqueue": "e2e/test_commands.py test_enqueue_reports_and_skips_bad_lines",
    "enqueue --again": "e2e/test_commands.py test_again_starts_over",
    "enqueue --id-column": "e2e/test_commands.py test_enqueue_uses_the_given_id_column",
    "enqueue --labels": "e2e/test_commands.py test_classifies_a_file_and_shows_results",
    "enqueue --labels --model": "e2e/test_several_models.py test_a_dead_letter_keeps_its_queue",
    "enqueue --priority": "e2e/test_acl.py test_producer_user_may_send_to_any_queue",
    "enqueue --priority --queue": "e2e/test_commands.py test_enqueue_sends_with_queue_and_priority",
    "enqueue --since --subreddit --until": "e2e/test_commands.py test_enqueue_filters_a_reddit_dump",
    "evaluate": "e2e/test_offline_commands.py test_evaluate_writes_measures_and_files",
    "evaluate --model": "e2e/test_train.py test_train_writes_a_model_that_can_be_served",
    "enqueue --queue": "e2e/test_several_models.py test_posts_are_classified_by_the_chosen_model",
    "export": "e2e/test_export_commands.py test_an_export_can_be_enqueued_again",
    "export --follow": "e2e/test_export_commands.py test_follow_exports_new_results",
    "export --follow --format": "e2e/test_export_commands.py test_follow_exports_new_results",
    "export --format": "e2e/test_export_commands.py test_an_export_can_be_enqueued_again",
    "export --columns --latest": "e2e/test_export_commands.py test_exports_chosen_columns_and_latest_results",
    "export --label --since --until": "e2e/test_export_commands.py test_exports_by_time_and_label",
    "export --purge": "e2e/test_export_commands.py test_purge_flag_removes_purged_posts",
    "flower": "e2e/test_flower.py flower",
    "flower --address --port": "e2e/test_flower.py test_metrics_answer_only_loopback flower",
    "health": "e2e/test_health.py test_health_prints_text_or_json",
    "health --check": "e2e/test_health.py test_health_prints_text_or_json",
    "ingest gaps": "e2e/test_ingest.py test_gaps_are_listed_and_cleared",
    "ingest gaps --clear": "e2e/test_ingest.py test_gaps_are_listed_and_cleared",
    "ingest reddit": "e2e/test_ingest.py test_daemon_sends_new_posts_until_a_signal",
    "ingest reddit --limit --listing --once --period": "e2e/test_ingest.py test_single_pass_reads_the_top_listing",
    "ingest reddit --metrics-port": "e2e/test_ingest.py test_metrics_are_served_on_loopback",
    "ingest reddit --once": "e2e/test_ingest.py test_single_pass_continues_past_a_failing_topic",
    "ingest reddit --topics": "e2e/test_ingest.py test_single_pass_reads_the_top_listing",
    "ingest subreddits": "e2e/test_ingest.py test_subreddits_lists_replacements",
    "ingest topics": "e2e/test_ingest.py test_topics_prints_the_default_topics",
    "metrics": "e2e/test_health.py test_metrics_command_reports_queues_without_workers",
    "purge": "e2e/test_commands.py test_purge_removes_posts_and_lift_readmits_them",
    "purge --lift": "e2e/test_commands.py test_purge_removes_posts_and_lift_readmits_them",
    "purge --rewrite": "e2e/test_secrets.py test_purge_leaves_no_text_of_a_post",
    "report": "e2e/test_report.py test_page_is_self_contained",
    "report --hours --out --png": "e2e/test_report.py test_png_writes_pictures_of_the_charts",
    "results": "e2e/test_commands.py test_classifies_a_file_and_shows_results",
    "results --consumer --follow --group --json": "e2e/test_results_commands.py test_a_group_resumes_where_it_stopped",
    "results --consumer --group --json": "e2e/test_results_commands.py test_a_group_resumes_where_it_stopped",
    "results --failed": "e2e/test_results_commands.py test_failed_lists_dead_letters",
    "results --follow --group": "e2e/test_results_commands.py test_a_signal_ends_follow",
    "results --follow": "e2e/test_results_commands.py test_follow_shows_new_matching_results",
    "results --follow --json --limit": "e2e/test_results_commands.py test_follow_shows_new_matching_results",
    "results --label --min-score": "e2e/test_results_commands.py test_shows_the_newest_matching_results",
    "results --subreddit": "e2e/test_results_commands.py test_shows_the_newest_matching_results",
    "results get": "e2e/test_commands.py test_classifies_a_file_and_shows_results",
    "results get --json": "e2e/test_commands.py test_classifies_a_file_and_shows_results",
    "status": "e2e/test_commands.py test_classifies_a_file_and_shows_results",
    "status --json": "e2e/test_commands.py test_classifies_a_file_and_shows_results",
    "status --json --watch": "e2e/test_health.py test_watch_json_prints_one_line_per_reading",
    "status --watch": "e2e/test_health.py test_watch_without_a_terminal_prints_blocks",
    "train": "e2e/test_train.py test_train_writes_a_model_that_can_be_served",
    "train --from --labels --min-score --out": "e2e/test_train.py test_trains_on_results_and_exports",
    "train --from --labels --out --split": "e2e/test_train.py test_trains_on_results_and_exports",
    "train --from --out": "e2e/test_train.py test_train_writes_a_model_that_can_be_served",
    "trainer": "e2e/test_train.py test_training_job_stays_in_its_folder",
    "tune": "e2e/test_offline_commands.py test_tune_measures_and_stores_a_token_budget",
    "up": "e2e/test_stack.py test_up_keeps_its_data_and_other_commands_find_it",
    "url": "e2e/test_documentation.py test_messages_page_example_runs",
    "worker": "support.py working",
    "worker --classifier --queue": "unit/test_worker_command.py test_flags invoke",
    "worker --devices": "e2e/test_supervisor.py test_two_cpu_workers_in_a_terminal",
    "worker --devices --metrics-port": "unit/test_worker_command.py test_several_devices invoke",
    "worker --engine": "unit/test_worker_command.py test_flags invoke",
    "worker --include": "e2e/test_own_tasks.py worker",
    "worker --model": "e2e/test_several_models.py house",
    "worker --model --queue": "e2e/test_several_models.py house",
}


class Shown(NamedTuple):
    """A command of a page, as words. whole: nothing of it was left out."""

    page: str
    words: tuple[str, ...]
    whole: bool


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        ("cat ids.txt | FEEDMILL_QUEUE=mine feedmill enqueue - < more.txt  # and more", [("feedmill", "enqueue", "-")]),
        ("(cd x && feedmill purge ID…); .venv/bin/feedmill up", [("feedmill", "purge", "ID…"), ("feedmill", "up")]),
        ("kubectl --namespace feedmill exec deploy/metrics -- feedmill health", [("feedmill", "health")]),
        ("pip install 'feedmill[worker]'", []),
        ("somebody's feedmill", []),
    ],
)
def test_how_a_line_is_read(line: str, commands: list[tuple[str, ...]]) -> None:
    assert list(commands_in(line, "feedmill")) == commands


def test_there_are_such_commands() -> None:
    """Such arguments and flags, too, with values that they take."""
    for page, words, whole in shown("feedmill"):
        refused = refusal(words)
        assert refused in (None, "Exit") or (refused in LEFT_OUT and not whole), f"{page}: {' '.join(words)}: {refused}"


def test_blocks_with_commands_are_marked() -> None:
    for page in PAGES:
        for marked, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert marked == "sh" or not re.search(r"^(\$ )?(feedmill|make) [a-z]", block, re.MULTILINE), page


def test_each_is_run_by_a_test() -> None:
    found = {key: page for page, words, _ in shown("feedmill") if (key := key_of(words))}
    assert set(found) - set(RUN_BY) == set(), "say in RUN_BY which test runs it"
    assert set(RUN_BY) - set(found) == set(), "shown nowhere"


@pytest.mark.parametrize("key", RUN_BY)
def test_that_test_has_its_words(key: str) -> None:
    path, *names = RUN_BY[key].split()
    functions = functions_of(path)
    assert set(key.split()) <= set[str]().union(*(functions[name] for name in names))


def test_there_are_such_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = list(shown("make"))
    assert found
    for page, (_, *words), _ in found:
        for word in words:
            variable, given, _ = word.partition("=")
            wanted = rf"^{variable} \?=" if given else rf"^{word}:"
            assert re.search(wanted, makefile, re.MULTILINE), f"{page}: make {word}"


def test_there_are_such_modules() -> None:
    """With such flags. What is no module of ours is not asked for."""
    found = [
        one for one in shown("python") if one.words[1:2] == ("-m",) and (ROOT / one.words[2].split(".")[0]).is_dir()
    ]
    assert found
    for page, (_, _, module, *words), _ in found:
        source = source_of(module)
        for flag in words:
            assert not flag.startswith("--") or flag == "--help" or f'"{flag}"' in source, f"{page}: {module} {flag}"


def refusal(words: tuple[str, ...]) -> str | None:
    """What the command's parser has against the words, by its name; Exit: it was asked for help."""
    try:
        accept(FEEDMILL, list(words))
    except Exception as error:
        return type(error).__name__
    return None


def shown(program: str) -> Iterator[Shown]:
    """The commands of the documentation that start this program."""
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text()
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield from (Shown(name, words, True) for words in commands_in(line, program))
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            for line in alternatives(code):
                yield from (Shown(name, words, False) for words in commands_in(line, program))


def alternatives(code: str) -> Iterator[str]:
    """`dead list|show` is two commands."""
    return map(" ".join, product(*(word.split("|") if word.strip("|") else [word] for word in code.split())))


def commands_in(line: str, program: str) -> Iterator[tuple[str, ...]]:
    """Those of a line of shell that start this program, or have a launcher do so; without what is set for them."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    try:
        tokens = list(reader)
    except ValueError:  # prose with an apostrophe
        return
    command: list[str] = []
    for token in [*tokens, ";"]:
        if token.strip("();<>|&"):
            if command or not re.fullmatch(r"\w+=.*", token):
                command.append(token)
            continue
        if command and command[0] in LAUNCHERS and program in command:
            command = command[len(command) - command[::-1].index(program) - 1 :]
        if command and command[0].removeprefix(".venv/bin/") == program:
            yield (program, *(word for word in command[1:] if word != "…"))
        command = []


def key_of(words: tuple[str, ...]) -> str:
    """The command and its flags; nothing of a group of commands, which is none itself."""
    command = FEEDMILL
    names = []
    for word in words[1:]:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
        names.append(word)
    flags = sorted({word for word in words if word.startswith("--")})
    is_group = hasattr(command, "commands") and not command.invoke_without_command
    return "" if is_group and not flags else " ".join([*names, *flags])


@cache
def functions_of(path: str) -> dict[str, set[str]]:
    """The texts in each function of a file of tests, by its name; in its decorators, too."""
    return {
        node.name: {
            each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        for node in ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def source_of(module: str) -> str:
    """A module's, with those of the modules that it takes its `main` from."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return source + "".join(source_of(other) for other in re.findall(r"from (\S+) import main\b", source))
