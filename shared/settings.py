"""Every setting, with its unit and default.

A setting, its environment variable and its flag share one name.

`token_budget` is `FEEDMILL_TOKEN_BUDGET` in the environment and `--token-budget` on the command
line. Invalid values raise SettingsError, which names the variable and the accepted values.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from feedmill.shared.atomic_files import is_special
from feedmill.shared.errors import SettingsError, first_problem, printable
from feedmill.shared.label_files import labels_of_json, read_labels
from feedmill.shared.messages import Labels, NoneThreshold, Template
from feedmill.shared.none_of_these import NONE_WORDS

PREFIX = "FEEDMILL_"
#: Redis address used if none is set and `feedmill up` is not running.
FALLBACK_REDIS_URL = "redis://127.0.0.1:6379/0"
#: File in the data folder with the embedded stack's address. Written by `feedmill up`; readable by
#: its owner only.
STACK_FILE = "stack.json"
#: File in the data folder on which `feedmill up` holds an exclusive flock while it runs.
LOCK_FILE = "lock"
DAY_S = 86_400
#: Queue used if none is set.
DEFAULT_QUEUE = "feedmill"
#: Model used if none is set. It is installed as a package (workers/models/weights.py).
EMBEDDED_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
#: User of Flower's web interface and REST API.
FLOWER_USER = "feedmill"
#: Patterns of the settings `device` and `devices`: a GPU, and one or several GPUs that share a
#: model.
GPU = r"(?:0|[1-9][0-9]{0,3})"
GPUS = rf"{GPU}(?:\+{GPU}){{0,63}}"
DEVICES_PATTERN = rf"auto|all|cpu(:[1-9][0-9]{{0,3}})?|{GPUS}(,{GPUS})*"

#: Values of the setting `device` as users read them.
DEVICE_CHOICES = "auto, cpu, cuda, cuda:N, cuda:N+M or mps"
#: Pattern of a plug-in's import path, module:Class, in the settings `classifier` and `engine`.
PLUGIN_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
#: Values of the setting `engine` as users read them.
ENGINE_CHOICES = "torch, onnx, tensorrt or module:Class"
#: Built-in classifiers by name. Workers import one as a plug-in, only when a model needs it: the
#: imports of GLiClass take a second.
CLASSIFIERS = {
    "gliclass": "feedmill.workers.models.classifiers.gliclass:Gliclass",
    "head": "feedmill.workers.models.classifiers.fixed_labels:Head",
    "nli": "feedmill.workers.models.classifiers.pairs:Entailment",
    "rerank": "feedmill.workers.models.classifiers.pairs:Reranker",
    "sequence": "feedmill.workers.models.classifiers.fixed_labels:SequenceClassifier",
    "similarity": "feedmill.workers.models.classifiers.similarity:Similarity",
}
#: All values of the setting `classifier` as users read them.
CLASSIFIER_CHOICES = f"auto, {', '.join(CLASSIFIERS)} or module:Class"

#: The sixteen default topics, labels for messages that name none, with their descriptions; a file
#: of labels as users write them. The descriptions were chosen on one half of a set of real posts
#: and measured on the other (DECISIONS.md).
DESCRIBED_TOPICS: dict[str, tuple[str, ...]] = {
    topic: tuple(texts)
    for topic, texts in json.loads(
        Path(__file__).with_name("topics.json").read_text("utf-8")
    ).items()
}
TOPICS = tuple(DESCRIBED_TOPICS)

#: Default port of each supported URL scheme.
PORTS = {"redis": 6379, "rediss": 6379, "sentinel": 26379}
#: Valkey's names for the schemes of the same protocol.
ALIASES = {"valkey://": "redis://", "valkeys://": "rediss://"}
HOST = re.compile(r"[^,\s]+")
DATABASE = re.compile(r"(/\d*)?")
MALFORMED = (
    "must look like redis://:password@host:6379/0, as rediss://… for TLS, or, for several "
    "servers, as sentinel://:password@host:26379/0;sentinel://… with the same user, password and "
    "database (the master's) for each Sentinel; without ?options, and with / # ? and ; in the "
    "password percent-encoded (docs/redis.md)"
)
#: Values that name a file of labels: @ and a path, or a single name with one of these endings.
FILE_NAME = re.compile(r"@.+|[^,\n\[{]+\.(json|csv|txt)", re.IGNORECASE | re.DOTALL)

#: Values that would be a strange label, and are a file if there is one of this name.
OTHER_FILE_NAME = re.compile(r"[^,\n]*[./][^,\n]*")

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def _form(pattern: str, words: str) -> AfterValidator:
    """Validate values against a pattern. words: description of valid values, for errors and
    documentation.
    """

    def check(value: Any) -> Any:
        if isinstance(value, SecretStr):
            text = value.get_secret_value()
            quoted = ""
        else:
            text = value
            quoted = f", not {value!r:.80}"
        if not re.fullmatch(pattern, text):
            raise ValueError(f"should be {words}{quoted}")
        return value

    return AfterValidator(check)


def _check_server_url(url: str) -> str:
    """Check the URL of a server. The error does not quote it, because it may hold a password."""
    if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?", url):
        raise ValueError(
            "should be a URL such as http://127.0.0.1:8765, without a user, a password or a query"
        )
    return url


#: The address of a web server. Without a user, a password or a query: it appears in logs.
ServerUrl = Annotated[str, AfterValidator(_check_server_url)]
Prompt = Annotated[str, _form(r"(?s).{1,2000}", "1 to 2,000 characters")]


@dataclass(frozen=True)
class Address:
    """A parsed Redis address. `hosts` are the server itself, or its Sentinels."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    database: int
    user: str | None
    password: str | None = field(repr=False)


LanguageCodes = Annotated[
    str,
    _form(
        r"[A-Za-z]{2,3}( *, *[A-Za-z]{2,3})*",
        "language codes of two or three letters, such as en,pt",
    ),
]


class Settings(BaseSettings):
    """Settings of every process.

    Values come from flags, then environment variables, then these defaults. A field's description
    is the help of its flag, for commands that have one. Comments go on from there, for
    docs/reference/settings.md.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
    )

    # Connections and folders.

    #: All parts: redis://[user]:[password]@host:port/database. rediss://… is with TLS,
    #: sentinel://…;sentinel://… through Sentinels (docs/redis.md).
    redis_url: SecretStr | None = Field(
        None,
        description=(
            "Redis URL: redis://:password@host:6379/0 (default: the running `feedmill up`, "
            "else localhost)."
        ),
    )
    #: PEM file of certificate authorities trusted for a rediss:// server. Unset: the machine's
    #: trusted authorities.
    redis_ca_file: Path | None = None
    #: PEM file of the client certificate, for rediss:// servers that require one.
    redis_certificate_file: Path | None = None
    #: PEM file of the client certificate's key, without a passphrase; unset if the certificate's
    #: file has it.
    redis_key_file: Path | None = None
    #: Name of the master in the Sentinels' configuration. Required for a sentinel:// address.
    redis_master: (
        Annotated[str, _form(r"[!-~]{1,128}", "a name without spaces")] | None
    ) = Field(None, validate_default=True)
    #: Password of the Sentinels themselves, if they require one.
    redis_sentinel_password: SecretStr | None = None
    #: It holds the append-only file of the embedded Redis, too, and the stack's address.
    data_folder: Path = Field(
        Path("~/.local/share/feedmill"),
        description="Folder for data and logs of `feedmill up`.",
    )
    #: A worker serves this Celery queue, and producers send to it by default. Each model needs its
    #: own queue (docs/models.md).
    queue: Annotated[
        str,
        _form(
            r"[A-Za-z0-9_.-]{1,64}",
            ("1 to 64 letters, digits, dots, dashes or underscores"),
        ),
    ] = Field(DEFAULT_QUEUE, description="Queue name.")

    # Producers.

    #: Larger messages cost less per post, but a crash repeats more work.
    posts_per_message: Annotated[int, Field(ge=1, le=1000)] = Field(
        32, description="Posts per message."
    )
    #: There are four levels: 0 to 2, 3 to 5, 6 to 8, and 9.
    priority: Annotated[int, Field(ge=0, le=9)] = Field(
        0, description="Message priority, 0 (first) to 9 (last)."
    )
    #: Waiting messages in the queue at which producers pause, until half of them wait.
    queue_limit: Count = 20_000
    #: Seconds for which sent posts are not sent again, and up to an eighth longer.
    sent_ttl: Count = 30 * DAY_S
    #: `enqueue` and `ingest bluesky` send only such posts; workers and `classify` give a label to
    #: no others. Posts whose language is uncertain are sent, and get a label. Unset: all posts.
    #: Needs the extra `languages`.
    languages: LanguageCodes | None = Field(
        None,
        description=(
            "Languages of the posts to send or to label, detected from their texts: en,pt."
        ),
    )

    # Reddit daemon.

    #: ID of an app registered with Reddit. Unset: PRAW's praw_client_id, or praw.ini (section:
    #: praw_site).
    reddit_client_id: SecretStr | None = None
    #: Secret of that app. Unset: PRAW's praw_client_secret, or praw.ini.
    reddit_client_secret: SecretStr | None = None
    #: User agent, in the form that Reddit requires: <platform>:<app ID>:<version> (by /u/<user>).
    reddit_user_agent: (
        Annotated[str, _form(r"[ -~]{7,200}", "7 to 200 printable ASCII characters")]
        | None
    ) = None
    #: URL of a server that answers as Reddit does, such as a mirror or
    #: `python -m feedmill.testing.reddit`. It receives the app's secret. Unset: Reddit.
    reddit_url: ServerUrl | None = None
    #: URL of a mirror of Arctic Shift. Unset: Arctic Shift itself.
    arctic_shift_url: ServerUrl | None = None
    #: `feedmill ingest topics` prints the default.
    reddit_topics: Path | None = Field(
        None, description="Topics file in TOML (default: built in)."
    )
    #: Seconds between polls of a topic's new posts.
    reddit_poll_interval: Seconds = 60.0
    #: Source from which the Reddit daemon fills gaps. Unset: none; gaps stay listed.
    reddit_fill_gaps: Literal["arctic-shift"] | None = None

    # Bluesky and other live sources.

    #: URLs of Jetstream servers, without a path: Bluesky's, or your own. The daemon reads from the
    #: first one, and moves to the next one after a failure.
    bluesky_url: Annotated[
        str,
        _form(
            r"wss?://[^/?#\s,]+( *, *wss?://[^/?#\s,]+){0,15}",
            "a URL such as wss://jetstream.example.org, or up to 16 separated by commas",
        ),
    ] = (
        "wss://jetstream2.us-east.bsky.network,wss://jetstream1.us-east.bsky.network,"
        "wss://jetstream2.us-west.bsky.network,wss://jetstream1.us-west.bsky.network"
    )
    #: Unset: all accounts. At most 10,000.
    bluesky_accounts: str | None = Field(
        None,
        min_length=1,
        description="Read only posts of these accounts: did:plc:…,did:web:…, or a file of them.",
    )
    #: URL of a Jetstream server of version 2, from whose archive gaps are filled. Unset: gaps stay
    #: listed.
    bluesky_archive_url: ServerUrl | None = None
    #: API key of that archive, if it wants one.
    bluesky_archive_key: SecretStr | None = None
    #: Unset: all posts.
    bluesky_languages: LanguageCodes | None = Field(
        None,
        description="Read only posts that declare one of these languages: en,pt.",
    )
    #: Posts without text are left out in any case.
    bluesky_min_characters: Count = Field(
        1, description="Read only posts with at least this many characters."
    )

    #: Its timelines are public on most servers.
    mastodon_url: Annotated[
        str, _form(r"https?://[^/?#\s@]+", "a URL such as https://mastodon.example")
    ] = Field("https://mastodon.social", description="URL of a Mastodon server.")
    #: Token of an app with the scope read:statuses. Unset: the server is read without one.
    mastodon_token: SecretStr | None = None
    #: Some servers refuse programs that do not name themselves; Reddit limits them more.
    feeds_user_agent: (
        Annotated[str, _form(r"[ -~]{7,200}", "7 to 200 printable ASCII characters")]
        | None
    ) = Field(
        None,
        description="User agent of requests for feeds: who asks, and an address to write to.",
    )

    # Workers.

    #: A folder holds a transformers model. The default needs no hub.
    model: str = Field(
        EMBEDDED_MODEL,
        description=(
            "Model: a folder or a Hugging Face Hub name (default: the bundled all-MiniLM-L6-v2)."
        ),
    )
    #: A commit pins the model.
    revision: (
        Annotated[str, _form(r"[A-Za-z0-9._/-]{1,128}", "a branch, tag or commit")]
        | None
    ) = Field(None, description="Branch, tag or commit of a Hub model (default: main).")
    #: Run the model's Python code, with all rights of the worker's user. Review it and pin
    #: `revision`.
    trust_remote_code: bool = False
    #: auto selects one from the model's files (docs/models.md). module:Class loads a plug-in
    #: (docs/extending.md).
    classifier: Annotated[
        str,
        _form(rf"auto|{'|'.join(CLASSIFIERS)}|{PLUGIN_PATTERN}", CLASSIFIER_CHOICES),
    ] = Field("auto", description=f"Classifier: {CLASSIFIER_CHOICES}.")
    #: onnx is ONNX Runtime on CUDA or a CPU, tensorrt is TensorRT through ONNX Runtime.
    #: module:Class loads a plug-in.
    engine: Annotated[
        str, _form(rf"torch|onnx|tensorrt|{PLUGIN_PATTERN}", ENGINE_CHOICES)
    ] = Field("torch", description=f"Inference engine: {ENGINE_CHOICES}.")
    #: Folder from which `feedmill deploy` may load models in this worker, including subfolders.
    #: Unset: any folder.
    models_folder: Path | None = None
    #: auto selects one of this machine's; cuda:0+1 spreads a model over two GPUs, because it does
    #: not fit one.
    device: Annotated[
        str,
        _form(
            rf"auto|cpu|mps|cuda(:{GPUS})?",
            DEVICE_CHOICES,
        ),
    ] = Field("auto", description=f"Device: {DEVICE_CHOICES}.")
    #: `feedmill worker` starts one process for each, `feedmill classify` and
    #: `feedmill.Classifier` use all of them (docs/devices.md).
    devices: (
        Annotated[
            str,
            _form(
                DEVICES_PATTERN,
                "auto, all, GPU numbers such as 0,2 or 0+1, cpu or cpu:N",
            ),
        ]
        | None
    ) = Field(
        None,
        description=(
            "Several devices, a model on each: auto, all, GPUs such as 0,2, cpu or cpu:N; 0+1 is "
            "one model on two GPUs; auto is all GPUs, each with as many workers as fill it "
            "(default: --device)."
        ),
    )
    #: Share of the GPU's memory that the worker may use. With `devices` auto, the workers of a GPU
    #: divide it among themselves. Engine torch only.
    device_memory: Annotated[float, Field(gt=0, le=1)] = 1.0
    #: auto: float16 on a GPU, or bfloat16 if the model needs it; bfloat16 on a CPU that
    #: supports it (engine torch only), else float32. int8: dynamic quantization, for engine onnx
    #: on a CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="Data type: auto, float32, bfloat16, float16 or int8.",
    )
    #: A worker's labels apply to messages without labels (docs/models.md). Unset: the sixteen
    #: topics of shared/topics.json.
    labels: Annotated[Labels | None, NoDecode] = Field(
        None,
        description=(
            'Candidate labels: a,b,c; JSON such as ["a", "b"] or {"a": "description"}; or a file: '
            "labels.json, labels.csv, labels.txt."
        ),
    )
    #: Entailment models call it the hypothesis template. Unset: "This example is {}." for nli; the
    #: label itself for gliclass; "This post is about {}." for rerank and similarity.
    template: Template | None = Field(
        None,
        description="Sentence with {} in place of the label, such as 'This post is about {}.'",
    )
    #: Score below which posts have no label, because they fit none, for messages that do not say:
    #: 0 to 1, or true for the model's default (docs/models.md). Unset: each post has a label.
    none: NoneThreshold = None
    #: Prompt before each post, for embedding models and rerankers: a name of the model's prompts,
    #: such as query; a text with its final space, such as "query: "; or none. Unset: the model's
    #: default.
    post_prompt: Prompt | None = None
    #: Prompt before each label's sentence, for embedding models: a name, a text or none, as in
    #: `post_prompt`.
    label_prompt: Prompt | None = None
    #: Maximum tokens per post. The model's own limit applies if it is lower. For gliclass, labels
    #: come in addition.
    max_tokens: Annotated[int, Field(ge=8)] = 256
    #: Counts rows times the longest row.
    token_budget: Count | None = Field(
        None,
        description="Maximum tokens per micro-batch, with padding (default: measured once).",
    )
    #: Maximum rows per micro-batch.
    batch_rows: Count = 256
    #: Waiting rows at which a worker stops fetching messages; it holds at most 1,024 messages.
    #: Larger values reduce padding on fast devices and increase latency.
    window_rows: Count = 8192
    #: Seconds after which a hanging forward pass, other classifier call, or trial of a deployed
    #: model ends the worker.
    forward_timeout: Seconds = 300.0
    #: Folder for measurements that workers reuse. Can be deleted at any time.
    cache_folder: Path = Path("~/.cache/feedmill")
    #: See docs/celery.md.
    include: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Modules with your own Celery tasks to load: a,b.c.",
    )
    #: Celery result backend: redis, or rpc to reply directly to the sender's queue.
    celery_results: Literal["redis", "rpc"] = "redis"
    #: Seconds that a worker has on SIGTERM to finish its messages. Unfinished ones return to the
    #: queue.
    drain: Seconds = 30.0

    # Retention.

    #: Seconds for which results are kept, and up to an eighth longer.
    results_ttl: Count = 7 * DAY_S
    #: Memory in Redis, such as 500MB, for results and their stream, which may take 45% of it.
    #: Records of sent posts may take half as much in addition. When it is reached, the oldest are
    #: dropped before their time. The lowest one of all workers and producers applies.
    results_memory: Annotated[ByteSize, Field(ge=10_000_000)] = ByteSize(10**9)
    #: Approximate maximum entries of the results stream. Redis trims whole nodes.
    results_stream_length: Count = 100_000
    #: Approximate maximum entries of the dead-letter stream.
    dead_letters_length: Count = 10_000
    #: Characters of a post's body in its stream entry.
    stream_body: Annotated[int, Field(ge=0)] = 500

    # Metrics, Flower and logs.

    #: Serves health checks of the worker or daemon, too. Each process needs its own; several
    #: `devices` use consecutive ports. Unset or 0: disabled.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="Port for Prometheus metrics."
    )
    #: Address on which metrics are served, without authentication.
    metrics_address: Annotated[
        str,
        _form(r"[A-Za-z0-9.:_-]{1,253}", ("a host name or IP address of this machine")),
    ] = "127.0.0.1"
    #: Password of the user feedmill for Flower. Unset: `feedmill up` generates one;
    #: `feedmill flower` needs it.
    flower_password: (
        Annotated[
            SecretStr, _form(r"[ -~]{1,256}", ("1 to 256 printable ASCII characters"))
        ]
        | None
    ) = None
    #: Password of the pages of `feedmill web`, for any user name. Required, or web_tokens, unless
    #: it listens on this machine's loopback address.
    web_password: (
        Annotated[
            SecretStr, _form(r"[ -~]{8,256}", ("8 to 256 printable ASCII characters"))
        ]
        | None
    ) = None
    #: Tokens for the endpoint of `feedmill web`, separated by commas: a name, scopes (read, send,
    #: teach, admin) and a secret, such as archive:read+send:SECRET (docs/web.md).
    web_tokens: SecretStr | None = None
    #: Comma-separated host names under which `feedmill web` is reached, such as those of a proxy,
    #: besides this machine's loopback names.
    web_hosts: Annotated[
        str,
        _form(
            r"[A-Za-z0-9.,:_\[\] -]{0,1000}",
            "host names such as a.example.org,b.example.org",
        ),
    ] = ""
    #: `feedmill web` stores there what people answer on its pages, and the models that they teach.
    #: `feedmill label --out` can use the same folder.
    answers: Path | None = Field(
        None,
        description=(
            "Folder of people's answers and of taught models (default: answers in the data "
            "folder)."
        ),
    )
    #: Address of Flower, for a link on the page of the system.
    web_flower_url: ServerUrl | None = None
    #: Address of Grafana, for a link on the page of the system.
    web_grafana_url: ServerUrl | None = None
    #: Requests per second that one address may send to `feedmill web`, on average; twice as many
    #: in a second.
    web_rate: Annotated[float, Field(gt=0)] = 500.0
    #: Comma-separated host names to which `feedmill web` may send notices of finished runs. Unset:
    #: none.
    web_webhook_hosts: Annotated[
        str,
        _form(
            r"[A-Za-z0-9.,: -]{0,1000}",
            "host names such as a.example.org,b.example.org:8443",
        ),
    ] = ""
    #: Secret that signs these notices. Required for them.
    web_webhook_secret: (
        Annotated[
            SecretStr, _form(r"[ -~]{16,256}", "16 to 256 printable ASCII characters")
        ]
        | None
    ) = None
    #: Log format on standard error: text, or json with one object per line.
    log_format: Literal["text", "json"] = "text"
    #: Minimum level of log records.
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def named_devices(self) -> str | None:
        """The setting `devices` for programs that do not choose a number of processes: None for
        auto.
        """
        if self.devices == "auto":
            return None
        return self.devices

    @property
    def sent_memory(self) -> int:
        """Bytes that records of sent posts may take.

        Beyond them, the oldest go: those posts can be sent twice.
        """
        return self.results_memory // 2

    _labels_file: Path | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _note_labels_file(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        settings = handler(data)
        labels = data.get("labels") if isinstance(data, dict) else None
        if isinstance(labels, str):
            settings._labels_file = _named_file(labels)
        return settings

    @property
    def labels_file(self) -> Path | None:
        """The file that the labels were read from; None for labels given as such."""
        return self._labels_file

    @field_validator("labels", mode="before")
    @classmethod
    def _parse_labels(cls, value: object) -> object:
        """Parse labels that a file, JSON (which can contain commas and descriptions) or a list
        with commas names.
        """
        if not isinstance(value, str):
            return value
        file = _named_file(value)
        if file is not None:
            return read_labels(file)
        if value.lstrip()[:1] not in ("[", "{"):
            _require_name(value.strip())
            # As a list, in which an empty name is an error: a message's text may contain empty
            # parts, as in transformers' pipeline.
            return value.split(",")
        return labels_of_json(value)

    @field_validator("none", mode="before")
    @classmethod
    def _from_word(cls, value: object) -> object:
        """Parse a threshold given as a word."""
        if isinstance(value, str):
            return NONE_WORDS.get(value.strip().lower(), value)
        return value

    @field_validator("include", mode="before")
    @classmethod
    def _from_names(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in value.split(",")]
        return tuple(filter(None, names))

    @field_validator("devices")
    @classmethod
    def _is_one_way(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Reject a conflicting setting `device`, which overrides auto."""
        device = info.data.get("device", "auto")
        if value == "auto" and device != "auto":
            return None
        if value is not None and device != "auto":
            raise ValueError(
                f"cannot be combined with {PREFIX}DEVICE; set only one of them"
            )
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        url = _normalize(value.get_secret_value())
        _parse_address(url)
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
            raise ValueError(
                f"must be set to the master's name in the Sentinels of {PREFIX}REDIS_URL"
            )
        return value

    @field_validator("data_folder", "cache_folder", "models_folder", "reddit_topics")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @property
    def broker_url(self) -> str:
        """Redis' address including its password. Use it to connect; never show it to users.

        A running stack's address is read once: a command that runs on while `feedmill up` is
        restarted keeps it.

        Raises SettingsError while a `feedmill up` has not started its Redis yet.
        """
        if self.redis_url is not None:
            return self.redis_url.get_secret_value()
        url = self._read_stack_url()
        return FALLBACK_REDIS_URL if url is None else url

    def _read_stack_url(self) -> str | None:
        """Return the address of the running stack, as it was when it was first read; None if none
        runs.
        """
        # where `cached_property` would keep it: no part of equality
        url: str | None = self.__dict__.get("stack_url")
        if not url:
            url = read_stack_url(self.data_folder)
            self.__dict__["stack_url"] = url
        return url

    @property
    def redis(self) -> Address:
        """Redis' parsed address, including its password."""
        return _parse_address(self.broker_url)

    @property
    def redis_address(self) -> str:
        """Redis' address without user and password, for messages to users."""
        address = self.redis
        places = ", ".join(f"{host}:{port}" for host, port in address.hosts)
        if address.scheme == "sentinel":
            return f"{self.redis_master}/{address.database} of the Sentinels {places}"
        return f"{places}/{address.database}"


def _named_file(labels: str) -> Path | None:
    """Return the file of labels that a value names, or None."""
    name = labels.strip()
    return Path(name.removeprefix("@")) if FILE_NAME.fullmatch(name) else None


def _require_name(value: str) -> None:
    """Raise ValueError if one label is the path of a file: other endings than those of FILE_NAME
    need an @.
    """
    if not OTHER_FILE_NAME.fullmatch(value):
        return
    try:
        is_file = Path(value).is_file()
    except (OSError, ValueError):  # too long a name, or a null character
        return
    if is_file:
        name = printable(value)
        raise ValueError(
            f"{name} is a file, not a label; write @{name} to read its labels, one per line or as "
            "JSON, or save them as .csv"
        )


def _normalize(url: str) -> str:
    """Return an address with Redis' name of its scheme, which kombu and Celery know, instead of
    Valkey's.
    """
    url = url.strip()
    for alias, name in ALIASES.items():
        if url.startswith(alias):
            return name + url.removeprefix(alias)
    return url


def _parse_address(url: str) -> Address:
    """Parse an address.

    Raises ValueError with the accepted form; the text never contains the password.

    kombu accepts unsupported addresses silently: it would pick one of several redis:// URLs, for
    example.
    """
    servers = [_split(part) for part in url.split(";")]
    first = servers[0]
    shared_parts = {
        (server.scheme, server.username, server.password, _database_of(server))
        for server in servers
    }
    if len(shared_parts) > 1:
        raise ValueError(MALFORMED)
    if len(servers) > 1 and first.scheme != "sentinel":
        raise ValueError(MALFORMED)
    hosts = [
        (server.hostname or "", server.port or PORTS[server.scheme])
        for server in servers
    ]
    password = None if first.password is None else unquote(first.password)
    return Address(
        scheme=first.scheme,
        hosts=tuple(hosts),
        database=int(_database_of(first)),
        user=unquote(first.username or "") or None,
        password=password,
    )


def _database_of(server: SplitResult) -> str:
    return server.path.strip("/") or "0"


def _split(url: str) -> SplitResult:
    """Return the parts of a server's address. Raises ValueError as `_parse_address` does."""
    try:
        server = urlsplit(url.strip())
        port = server.port
    # The port is not a number. The original error would quote the password.
    except ValueError:
        raise ValueError(MALFORMED) from None
    has_host = HOST.fullmatch(server.hostname or "") and port != 0
    has_database = DATABASE.fullmatch(server.path)
    has_options = server.query or server.fragment
    if server.scheme not in PORTS or not has_host or not has_database or has_options:
        raise ValueError(MALFORMED)
    return server


def _scheme(info: ValidationInfo) -> str:
    """Return the scheme of the valid Redis address; "redis" if none is set, as for the embedded
    stack.
    """
    url = info.data.get("redis_url")
    if url is None:
        return "redis"
    address = _parse_address(url.get_secret_value())
    return address.scheme


def _require_scheme(scheme: str, info: ValidationInfo) -> None:
    """Reject settings that have no effect for this kind of address: setting certificates implies a
    need for TLS.
    """
    if "redis_url" not in info.data:  # it is invalid
        return
    actual_scheme = _scheme(info)
    if actual_scheme == scheme:
        return
    actual = "is not set"
    if info.data["redis_url"]:
        actual = f"begins with {actual_scheme}://"
    raise ValueError(
        f"is for {scheme}:// addresses, but {PREFIX}REDIS_URL {actual}; change the address, "
        "or unset this setting"
    )


def read_stack_url(folder: Path) -> str | None:
    """Return the address of the running `feedmill up` with data in this folder; None if none runs.

    Raises SettingsError while it has not started its Redis yet.
    """
    # The lock, because a killed `feedmill up` leaves its file behind, and another program may have
    # taken its port.
    if not is_folder_locked(folder):
        return None
    path = folder / STACK_FILE
    try:
        stack = json.loads(path.read_text())
        return str(stack["redis_url"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Not localhost: another Redis there would take the posts that are meant for this one.
        raise SettingsError(
            f"`feedmill up` is starting or stopping: its address cannot be read from {path}. "
            f"Run the command again when it has started, or set {PREFIX}REDIS_URL."
        ) from None


def is_folder_locked(folder: Path) -> bool:
    """Return whether a `feedmill up` uses this data folder, also while it starts and stops.

    Raises SettingsError.
    """
    path = folder / LOCK_FILE
    if is_special(path):  # opening a pipe would wait for a writer
        return False
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SettingsError(
            f"Cannot check whether `feedmill up` is running: {path} cannot be read "
            f"({error.strerror}). Set {PREFIX}REDIS_URL instead."
        ) from None
    return False


def load(**flags: Any) -> Settings:
    """Load settings from flags (None: not given), environment variables and defaults, in this
    order of precedence.

    Raises SettingsError with the variable's or flag's name and the accepted values.
    """

    def flag_of(name: str) -> str:
        words = name.replace("_", "-")
        return f"--{words}"

    return _load(flags, flag_of)


def load_arguments(**arguments: Any) -> Settings:
    """Load settings from a Python function's arguments: like `load`, but errors name arguments,
    not flags.
    """
    return _load(arguments, lambda name: name)


def _load(arguments: dict[str, Any], name_of: Callable[[str], str]) -> Settings:
    values = {name: value for name, value in arguments.items() if value is not None}
    try:
        return Settings(**values)
    except ValidationError as error:
        field, reason = first_problem(error)
        name, _, item = field.partition(".")
        place = name_of(name) if name in values else f"{PREFIX}{name.upper()}"
        if item:
            place += f": {item}"
        raise SettingsError(f"{place}: {reason}.") from None


def variables(settings: Settings) -> dict[str, str]:
    """Return environment variables that pass these settings to a child process: explicit values,
    without secrets.
    """
    explicit = settings.model_dump(mode="json", include=settings.model_fields_set)
    environment: dict[str, str] = {}
    for name, value in explicit.items():
        is_secret = isinstance(getattr(settings, name), SecretStr)
        if not is_secret:
            environment[f"{PREFIX}{name.upper()}"] = _as_variable(value)
    return environment


def _as_variable(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, dict):
        return json.dumps(value)
    return "" if value is None else str(value)


def unknown_variables() -> Iterator[str]:
    """Yield a sentence for each environment variable that has the prefix but is not a setting."""
    prefix = PREFIX.lower()
    for variable in sorted(os.environ):
        lowered = variable.lower()
        is_setting = lowered.removeprefix(prefix) in Settings.model_fields
        if lowered.startswith(prefix) and not is_setting:
            yield f"{variable} is not a setting and is ignored"
