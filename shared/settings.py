"""Every setting, with its unit and default. A setting, its environment variable and its flag share one name.

`token_budget` is `FEEDMILL_TOKEN_BUDGET` in the environment and `--token-budget` on the command line. Invalid values
raise SettingsError, which names the variable and the accepted values.
"""

import csv
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, ByteSize, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from feedmill.shared.errors import SettingsError, first_problem, json_problem, printable
from feedmill.shared.messages import Labels, Template

PREFIX = "FEEDMILL_"
#: Redis address used if none is set and `feedmill up` is not running.
FALLBACK_REDIS_URL = "redis://127.0.0.1:6379/0"
#: File in the data folder with the embedded stack's address. Written by `feedmill up`; readable by its owner only.
STACK_FILE = "stack.json"
#: File in the data folder on which `feedmill up` holds an exclusive flock while it runs.
LOCK_FILE = "lock"
DAY_S = 86_400
#: Queue used if none is set.
DEFAULT_QUEUE = "feedmill"
#: User of Flower's web interface and REST API.
FLOWER_USER = "feedmill"
#: Pattern of the setting `devices`.
DEVICES_PATTERN = r"all|cpu(:[1-9][0-9]{0,3})?|(0|[1-9][0-9]{0,3})(,(0|[1-9][0-9]{0,3}))*"

#: Pattern of a plug-in's import path, module:Class, in the settings `classifier` and `engine`.
PLUGIN_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
#: Built-in classifiers, and all values of the setting as users read them.
CLASSIFIERS = ("gliclass", "head", "nli", "rerank", "sequence", "similarity")
CLASSIFIER_CHOICES = f"auto, {', '.join(CLASSIFIERS)} or module:Class"

#: The sixteen default topics, labels for messages that name none, with their descriptions; a file of labels as users
#: write them. The descriptions were chosen on one half of a set of real posts and measured on the other (DECISIONS.md).
DESCRIBED_TOPICS: dict[str, tuple[str, ...]] = {
    topic: tuple(texts)
    for topic, texts in json.loads(Path(__file__).with_name("topics.json").read_text("utf-8")).items()
}
TOPICS = tuple(DESCRIBED_TOPICS)

#: Default port of each supported URL scheme.
PORTS = {"redis": 6379, "rediss": 6379, "sentinel": 26379}
#: Valkey's names for the schemes of the same protocol.
ALIASES = {"valkey://": "redis://", "valkeys://": "rediss://"}
HOST, DATABASE = re.compile(r"[^,\s]+"), re.compile(r"(/\d*)?")
MALFORMED = (
    "must look like redis://:password@host:6379/0, as rediss://… for TLS, or, for several servers, as "
    "sentinel://:password@host:26379/0;sentinel://… with the same user, password and database (the master's) for each "
    "Sentinel; without ?options, and with / # ? and ; in the password percent-encoded (docs/redis.md)"
)
#: Maximum bytes of a file of labels: 256 labels with all their descriptions take less.
MAX_LABELS_FILE_BYTES = 2**20
#: Values that name a file of labels: @ and a path, or a single name with one of these endings.
FILE_NAME = re.compile(r"@.+|[^,\n\[{]+\.(json|csv|txt)", re.IGNORECASE | re.DOTALL)
#: Names of a first column, by which a CSV file's header is recognized.
HEADERS = frozenset({"label", "labels", "name"})

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def _form(pattern: str, words: str) -> AfterValidator:
    """Validate values against a pattern. words: description of valid values, for errors and documentation."""

    def check(value: Any) -> Any:
        is_secret = isinstance(value, SecretStr)
        if not re.fullmatch(pattern, value.get_secret_value() if is_secret else value):
            raise ValueError(f"should be {words}{'' if is_secret else f', not {value!r:.80}'}")
        return value

    return AfterValidator(check)


Prompt = Annotated[str, _form(r"(?s).{1,2000}", "1 to 2,000 characters")]


@dataclass(frozen=True)
class Address:
    """A parsed Redis address. `hosts` are the server itself, or its Sentinels."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    database: int
    user: str | None
    password: str | None = field(repr=False)


class Settings(BaseSettings):
    """Settings of every process. Values come from flags, then environment variables, then these defaults."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    # Connections and folders.

    #: Address of Redis: redis://[user]:[password]@host:port/database, rediss://… with TLS, or
    #: sentinel://…;sentinel://… (docs/redis.md). Unset: the running `feedmill up`, else localhost.
    redis_url: SecretStr | None = None
    #: PEM file of certificate authorities trusted for a rediss:// server. Unset: the machine's trusted authorities.
    redis_ca_file: Path | None = None
    #: PEM file of the client certificate, for rediss:// servers that require one.
    redis_certificate_file: Path | None = None
    #: PEM file of the client certificate's key, without a passphrase; unset if the certificate's file has it.
    redis_key_file: Path | None = None
    #: Name of the master in the Sentinels' configuration. Required for a sentinel:// address.
    redis_master: Annotated[str, _form(r"[!-~]{1,128}", "a name without spaces")] | None = Field(
        None, validate_default=True
    )
    #: Password of the Sentinels themselves, if they require one.
    redis_sentinel_password: SecretStr | None = None
    #: Folder of the embedded stack: its Redis' append-only file, its logs and its address.
    data_folder: Path = Path("~/.local/share/feedmill")
    #: Celery queue that a worker serves, and that producers send to by default. Each model needs its own queue
    #: (docs/models.md).
    queue: Annotated[str, _form(r"[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, dots, dashes or underscores")] = (
        DEFAULT_QUEUE
    )

    # Producers.

    #: Posts per message. Larger messages cost less per post, but a crash repeats more work.
    posts_per_message: Annotated[int, Field(ge=1, le=1000)] = 32
    #: Message priority: 0 (first) to 9 (last). There are four levels: 0 to 2, 3 to 5, 6 to 8, and 9.
    priority: Annotated[int, Field(ge=0, le=9)] = 0
    #: Waiting messages in the queue at which producers pause, until half of them wait.
    queue_limit: Count = 20_000
    #: Seconds for which sent posts are not sent again, and up to an eighth longer.
    sent_ttl: Count = 30 * DAY_S

    # Reddit daemon.

    #: ID of an app registered with Reddit. Unset: PRAW's praw_client_id, or praw.ini (section: praw_site).
    reddit_client_id: SecretStr | None = None
    #: Secret of that app. Unset: PRAW's praw_client_secret, or praw.ini.
    reddit_client_secret: SecretStr | None = None
    #: User agent, in the form that Reddit requires: <platform>:<app ID>:<version> (by /u/<user>).
    reddit_user_agent: Annotated[str, _form(r"[ -~]{7,200}", "7 to 200 printable ASCII characters")] | None = None
    #: TOML file of topics and their subreddits. `feedmill ingest topics` prints the default.
    reddit_topics: Path | None = None
    #: Seconds between polls of a topic's new posts.
    reddit_poll_interval: Seconds = 60.0
    #: Source from which the Reddit daemon fills gaps. Unset: none; gaps stay listed.
    reddit_fill_gaps: Literal["arctic-shift"] | None = None

    # Bluesky and other live sources.

    #: URL of a Jetstream server, without a path: one of Bluesky's, or your own.
    bluesky_url: Annotated[str, _form(r"wss?://[^/?#\s]+", "a URL such as wss://jetstream.example.org")] = (
        "wss://jetstream2.us-east.bsky.network"
    )
    #: Comma-separated language codes. Posts that declare none of them are left out. Unset: all posts.
    bluesky_languages: (
        Annotated[
            str, _form(r"[A-Za-z]{2,3}( *, *[A-Za-z]{2,3})*", "language codes of two or three letters, such as en,pt")
        ]
        | None
    ) = None
    #: Minimum characters of a post's text.
    bluesky_min_characters: Count = 1

    # Workers.

    #: Model: a folder with a transformers model, or a name on the model hub. The default is included and needs no hub.
    model: str = "sentence-transformers/all-MiniLM-L6-v2"
    #: Branch, tag or commit of a model on the hub. A commit pins the model.
    revision: Annotated[str, _form(r"[A-Za-z0-9._/-]{1,128}", "a branch, tag or commit")] | None = None
    #: Run the model's Python code, with all rights of the worker's user. Review it and pin `revision`.
    trust_remote_code: bool = False
    #: Classifier (docs/models.md). auto selects one from the model's files. module:Class loads a plug-in
    #: (docs/extending.md).
    classifier: Annotated[str, _form(rf"auto|{'|'.join(CLASSIFIERS)}|{PLUGIN_PATTERN}", CLASSIFIER_CHOICES)] = "auto"
    #: Inference engine: torch, or onnx for ONNX Runtime on CUDA or a CPU.
    #: module:Class loads a plug-in.
    engine: Annotated[str, _form(rf"torch|onnx|{PLUGIN_PATTERN}", "torch, onnx or module:Class")] = "torch"
    #: Folder from which `feedmill deploy` may load models in this worker, including subfolders. Unset: any folder.
    models_folder: Path | None = None
    #: Device that runs the model. auto selects one of this machine's.
    device: Annotated[str, _form(r"auto|cpu|mps|cuda(:[0-9]+)?", "auto, cpu, cuda, cuda:N or mps")] = "auto"
    #: Devices of `feedmill worker`, which starts one process for each (docs/devices.md). Unset: the one in `device`.
    devices: Annotated[str, _form(DEVICES_PATTERN, "all, GPU numbers such as 0,2, cpu or cpu:N")] | None = None
    #: Share of the GPU's memory that the worker may use. `devices` sets it for workers that share a GPU. Engine torch
    #: only.
    device_memory: Annotated[float, Field(gt=0, le=1)] = 1.0
    #: Precision. auto: float16 on a GPU, or bfloat16 if the model needs it; bfloat16 on a CPU that supports it (engine
    #: torch only), else float32. int8: dynamic quantization, for engine onnx on a CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    #: Labels for messages without any: names separated by commas, JSON, or a file (docs/models.md). Unset: the sixteen
    #: topics of shared/topics.json.
    labels: Annotated[Labels | None, NoDecode] = None
    #: Hypothesis template; {} is replaced by the label. Unset: "This example is {}." for nli; the label itself for
    #: gliclass; "This post is about {}." for rerank and similarity.
    template: Template | None = None
    #: Prompt before each post, for embedding models and rerankers: a name of the model's prompts, such as query; a text
    #: with its final space, such as "query: "; or none. Unset: the model's default.
    post_prompt: Prompt | None = None
    #: Prompt before each label's sentence, for embedding models: a name, a text or none, as in `post_prompt`.
    label_prompt: Prompt | None = None
    #: Maximum tokens per post. The model's own limit applies if it is lower. For gliclass, labels come in addition.
    max_tokens: Annotated[int, Field(ge=8)] = 256
    #: Maximum tokens per micro-batch: rows times the longest row. Unset: measured on the first start.
    token_budget: Count | None = None
    #: Maximum rows per micro-batch.
    batch_rows: Count = 256
    #: Waiting rows at which a worker stops fetching messages; it holds at most 1,024 messages. Larger values reduce
    #: padding on fast devices and increase latency.
    window_rows: Count = 8192
    #: Seconds after which a hanging forward pass, other classifier call, or trial of a deployed model ends the worker.
    forward_timeout: Seconds = 300.0
    #: Folder for measurements that workers reuse. Can be deleted at any time.
    cache_folder: Path = Path("~/.cache/feedmill")
    #: Comma-separated modules with your own Celery tasks for the worker to load (docs/celery.md).
    include: Annotated[tuple[str, ...], NoDecode] = ()
    #: Celery result backend: redis, or rpc to reply directly to the sender's queue.
    celery_results: Literal["redis", "rpc"] = "redis"
    #: Seconds that a worker has on SIGTERM to finish its messages. Unfinished ones return to the queue.
    drain: Seconds = 30.0

    # Retention.

    #: Seconds for which results are kept, and up to an eighth longer.
    results_ttl: Count = 7 * DAY_S
    #: Memory in Redis, such as 500MB, for results and their stream, which may take 45% of it. Records of sent posts may
    #: take half as much in addition. When it is reached, the oldest are dropped before their time. The lowest one of
    #: all workers and producers applies.
    results_memory: Annotated[ByteSize, Field(ge=10_000_000)] = ByteSize(10**9)
    #: Approximate maximum entries of the results stream. Redis trims whole nodes.
    results_stream_length: Count = 100_000
    #: Approximate maximum entries of the dead-letter stream.
    dead_letters_length: Count = 10_000
    #: Characters of a post's body in its stream entry.
    stream_body: Annotated[int, Field(ge=0)] = 500

    # Metrics, Flower and logs.

    #: Port of the metrics and health checks of a worker or daemon. Each process needs its own; several `devices` use
    #: consecutive ports. Unset or 0: disabled.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    #: Address on which metrics are served, without authentication.
    metrics_address: Annotated[str, _form(r"[A-Za-z0-9.:_-]{1,253}", "a host name or IP address of this machine")] = (
        "127.0.0.1"
    )
    #: Password of the user feedmill for Flower. Unset: `feedmill up` generates one; `feedmill flower` needs it.
    flower_password: Annotated[SecretStr, _form(r"[ -~]{1,256}", "1 to 256 printable ASCII characters")] | None = None
    #: Log format on standard error: text, or json with one object per line.
    log_format: Literal["text", "json"] = "text"
    #: Minimum level of log records.
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def sent_memory(self) -> int:
        """Bytes that records of sent posts may take. Beyond them, the oldest go: those posts can be sent twice."""
        return self.results_memory // 2

    @field_validator("labels", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        """Parse labels given as JSON, which can contain commas and descriptions, or as a file."""
        if not isinstance(value, str):
            return value
        if FILE_NAME.fullmatch(value.strip()):
            return _labels_in(value)
        if value.lstrip()[:1] not in ("[", "{"):
            # As a list, in which an empty name is an error: a message's text may contain empty parts, as in
            # transformers' pipeline.
            return value.split(",")
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"invalid JSON: {json_problem(error)}") from None

    @field_validator("include", mode="before")
    @classmethod
    def _from_names(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value

    @field_validator("devices")
    @classmethod
    def _is_one_way(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Reject a conflicting setting `device`."""
        if value is not None and info.data.get("device", "auto") != "auto":
            raise ValueError(f"cannot be combined with {PREFIX}DEVICE; set only one of them")
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        url = _normalized(value.get_secret_value())
        _parsed(url)
        return SecretStr(url)

    @field_validator("redis_ca_file", "redis_certificate_file", "redis_key_file")
    @classmethod
    def _is_for_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None:
            return None
        _require_scheme("rediss", info)
        return value.expanduser().absolute()

    @field_validator("redis_master", "redis_sentinel_password")
    @classmethod
    def _is_for_sentinels(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            _require_scheme("sentinel", info)
        elif info.field_name == "redis_master" and _scheme(info) == "sentinel":
            raise ValueError(f"must be set to the master's name in the Sentinels of {PREFIX}REDIS_URL")
        return value

    @field_validator("data_folder", "cache_folder", "models_folder", "reddit_topics")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @property
    def broker_url(self) -> str:
        """Redis' address including its password. Use it to connect; never show it to users.

        A running stack's address is read once: a command that runs on while `feedmill up` is restarted keeps it.

        Raises SettingsError while a `feedmill up` has not started its Redis yet.
        """
        if self.redis_url is not None:
            return self.redis_url.get_secret_value()
        if known := self.__dict__.get("stack_url"):  # where `cached_property` would keep it: no part of equality
            return str(known)
        # The lock, because a killed `feedmill up` leaves its file behind, and another program may have taken its port.
        if not is_folder_locked(self.data_folder):
            return FALLBACK_REDIS_URL
        try:
            found = str(json.loads((self.data_folder / STACK_FILE).read_text())["redis_url"])
        except (OSError, ValueError, KeyError):
            # Not localhost: another Redis there would take the posts that are meant for this one.
            raise SettingsError(
                f"`feedmill up` is starting or stopping: its address cannot be read from "
                f"{self.data_folder / STACK_FILE}. Run the command again when it has started, or set {PREFIX}REDIS_URL."
            ) from None
        self.__dict__["stack_url"] = found
        return found

    @property
    def redis(self) -> Address:
        """Redis' parsed address, including its password."""
        return _parsed(self.broker_url)

    @property
    def redis_address(self) -> str:
        """Redis' address without user and password, for messages to users."""
        found = self.redis
        places = ", ".join(f"{host}:{port}" for host, port in found.hosts)
        if found.scheme == "sentinel":
            return f"{self.redis_master}/{found.database} of the Sentinels {places}"
        return f"{places}/{found.database}"


def _normalized(url: str) -> str:
    """Return an address with Redis' name of its scheme, which kombu and Celery know, instead of Valkey's."""
    url = url.strip()
    return next((name + url.removeprefix(alias) for alias, name in ALIASES.items() if url.startswith(alias)), url)


def _parsed(url: str) -> Address:
    """Parse an address. Raises ValueError with the accepted form; the text never contains the password.

    kombu accepts unsupported addresses silently: it would pick one of several redis:// URLs, for example.
    """
    parts = [_split(each) for each in url.split(";")]
    first = parts[0]
    shared = {(part.scheme, part.username, part.password, part.path.strip("/") or "0") for part in parts}
    if (
        first.scheme not in PORTS
        or len(shared) > 1
        or (first.scheme != "sentinel" and len(parts) > 1)
        or any(
            not HOST.fullmatch(part.hostname or "")
            or part.port == 0
            or not DATABASE.fullmatch(part.path)
            or part.query
            or part.fragment
            for part in parts
        )
    ):
        raise ValueError(MALFORMED)
    return Address(
        first.scheme,
        tuple((part.hostname or "", part.port or PORTS[part.scheme]) for part in parts),
        int(first.path.strip("/") or 0),
        unquote(first.username or "") or None,
        None if first.password is None else unquote(first.password),
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.strip())
        _ = parts.port
    except ValueError:  # the port is not a number; the original error would quote the password
        raise ValueError(MALFORMED) from None
    return parts


def _labels_in(value: str) -> object:
    """Return the labels in the file that the value names: names, or an object of descriptions.

    It is JSON, CSV with a label and its descriptions per row, or text with a label per line.
    Raises ValueError if the file cannot be read.
    """
    path = Path(value.strip().removeprefix("@"))
    name = printable(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LABELS_FILE_BYTES + 1)
        if len(data) > MAX_LABELS_FILE_BYTES:
            raise ValueError(f"more than {MAX_LABELS_FILE_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(
            f"there is no file {name} with labels; values after @, or ending in .json, .csv or .txt, name a file"
        ) from None
    except (OSError, ValueError) as error:  # a path may contain a null character; the text may not be UTF-8
        raise ValueError(f"the file {name} cannot be read ({error})") from None
    if not text.strip():
        raise ValueError(f"the file {name} is empty")
    if path.suffix.lower() == ".csv":
        return _csv_labels(text)
    if path.suffix.lower() == ".json" or text.lstrip()[0] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the file {name} is not JSON: {json_problem(error)}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _csv_labels(text: str) -> object:
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=max(",;\t", key=lines[0].count))]
    if rows[0][0].lower() in HEADERS:
        del rows[0]
    names = [row[0] for row in rows]
    if len(set(names)) < len(names) or not any(any(row[1:]) for row in rows):
        return names
    return {row[0]: [cell for cell in row[1:] if cell] or [row[0]] for row in rows}


def _scheme(info: ValidationInfo) -> str:
    """Return the scheme of the valid Redis address; "redis" if none is set, as for the embedded stack."""
    url = info.data.get("redis_url")
    return "redis" if url is None else _parsed(url.get_secret_value()).scheme


def _require_scheme(scheme: str, info: ValidationInfo) -> None:
    """Reject settings that have no effect for this kind of address: setting certificates implies a need for TLS."""
    if "redis_url" in info.data and (found := _scheme(info)) != scheme:
        actual = f"begins with {found}://" if info.data["redis_url"] else "is not set"
        raise ValueError(
            f"is for {scheme}:// addresses, but {PREFIX}REDIS_URL {actual}; change the address, or unset this setting"
        )


def is_folder_locked(folder: Path) -> bool:
    """Return whether a `feedmill up` uses this data folder, also while it starts and stops. Raises SettingsError."""
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SettingsError(
            f"Cannot check whether `feedmill up` is running: {folder / LOCK_FILE} cannot be read ({error.strerror}). "
            f"Set {PREFIX}REDIS_URL instead."
        ) from None
    return False


def load(**flags: Any) -> Settings:
    """Load settings from flags (None: not given), environment variables and defaults, in this order of precedence.

    Raises SettingsError with the variable's or flag's name and the accepted values.
    """
    return _load(flags, lambda name: f"--{name.replace('_', '-')}")


def load_arguments(**arguments: Any) -> Settings:
    """Load settings from a Python function's arguments: like `load`, but errors name arguments, not flags."""
    return _load(arguments, lambda name: name)


def _load(given: dict[str, Any], name_of: Callable[[str], str]) -> Settings:
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        field, reason = first_problem(error)
        name, _, item = field.partition(".")
        shown = name_of(name) if name in given else f"{PREFIX}{name.upper()}"
        raise SettingsError(f"{shown}: {f'{item}: ' if item else ''}{reason}.") from None


def variables(settings: Settings) -> dict[str, str]:
    """Return environment variables that pass these settings to a child process: explicit values, without secrets."""
    given = settings.model_dump(mode="json", include=settings.model_fields_set)
    return {
        f"{PREFIX}{name.upper()}": _as_variable(value)
        for name, value in given.items()
        if not isinstance(getattr(settings, name), SecretStr)
    }


def _as_variable(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, dict):
        return json.dumps(value)
    return "" if value is None else str(value)


def unknown_variables() -> Iterator[str]:
    """Yield a sentence for each environment variable that has the prefix but is not a setting."""
    for variable in sorted(os.environ):
        name = variable.lower().removeprefix(PREFIX.lower())
        if name != variable.lower() and name not in Settings.model_fields:
            yield f"{variable} is not a setting and is ignored"
