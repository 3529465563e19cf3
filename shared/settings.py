"""Every setting, with its unit and its default. One name for setting, environment variable and flag.

`token_budget` is `FEEDMILL_TOKEN_BUDGET` in the environment and `--token-budget` on the command line.
Loading a bad value raises SettingsError, which names the variable and says what it should be.
"""

import fcntl
import json
import os
import re
import ssl
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared import address
from shared.errors import SettingsError, first_problem, json_problem
from shared.messages import Labels, Template

PREFIX = "FEEDMILL_"
#: Where Redis is looked for when nothing says otherwise and no `feedmill up` is running.
FALLBACK_REDIS_URL = "redis://127.0.0.1:6379/0"
#: In the data folder; written by `feedmill up`, readable by its owner alone.
STACK_FILE = "stack.json"
#: In the data folder; `feedmill up` holds an exclusive flock on it while it runs.
LOCK_FILE = "lock"
DAY = 86_400
#: The queue that is there without anybody naming it.
DEFAULT_QUEUE = "feedmill"
#: Several devices: `devices` below.
DEVICES = r"all|cpu(:[1-9][0-9]{0,3})?|(0|[1-9][0-9]{0,3})(,(0|[1-9][0-9]{0,3}))*"

#: What somebody brings of their own, by its place: `classifier` and `engine` below.
OWN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def _form(pattern: str, words: str) -> AfterValidator:
    """Values of this form alone; `words` tell people what it is."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"should be {words}, not {value!r:.80}")
        return value

    return AfterValidator(check)


class Settings(BaseSettings):
    """The settings of every process. Values come from flags, then the environment, then the defaults here."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    # Where things are.

    #: Redis, as redis://[user]:[password]@host:port/database; with TLS rediss://…; found by its Sentinels
    #: sentinel://…;sentinel://…, user, password and database being Redis' own. Unset: the running `feedmill up`, else
    #: localhost.
    redis_url: SecretStr | None = None
    #: File of the authorities, in PEM, that vouch for a rediss:// server. Unset: those that this machine trusts.
    redis_ca_file: Path | None = None
    #: File of this client's certificate, in PEM, where a rediss:// server asks for one.
    redis_certificate_file: Path | None = None
    #: File of that certificate's key, in PEM, without a passphrase.
    redis_key_file: Path | None = Field(None, validate_default=True)
    #: What the Sentinels call the master that a sentinel:// address means.
    redis_master: Annotated[str, _form(r"[!-~]{1,128}", "a name without spaces")] | None = Field(
        None, validate_default=True
    )
    #: Password of the Sentinels themselves, where they ask for one.
    redis_sentinel_password: SecretStr | None = None
    #: Folder of the embedded stack's data: the append-only file of its Redis, logs, its address.
    data_folder: Path = Path("~/.local/share/feedmill")
    #: Name of the Celery queue that posts wait in: of the one that a worker serves, and of that which senders send to
    #: unless they name another, or a model. A model has a queue of its own (docs/models.md).
    queue: Annotated[str, _form(r"[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, dots, dashes or underscores")] = (
        DEFAULT_QUEUE
    )

    # What producers do.

    #: Posts packed into one message. More cost less per post on the way, and are redone together after a crash.
    posts_per_message: Annotated[int, Field(ge=1, le=1000)] = 32
    #: How posts in a message are packed: gzip, which any Celery application reads, or none. It halves what a waiting
    #: post takes of Redis' memory and of the network; a few short posts are never packed.
    compression: Literal["gzip", "none"] = "gzip"
    #: Whose turn it is when messages wait, 0 before 9. In the queue Redis tells 0 to 2, 3 to 5, 6 to 8 and 9 apart.
    priority: Annotated[int, Field(ge=0, le=9)] = 0
    #: Messages that may wait in the queue; producers pause above. Bounds Redis' memory.
    queue_limit: Count = 20_000
    #: Messages in the queue below which a producer that paused goes on. Unset: half of queue_limit.
    queue_resume: Count | None = None
    #: What `feedmill enqueue` does when the queue is full, or Redis is at its memory limit: wait until there is room,
    #: or refuse, with a sentence. The Reddit daemon always waits.
    when_full: Literal["wait", "refuse"] = "wait"
    #: Seconds for which a post that was sent is remembered and not sent again.
    sent_ttl: Count = 30 * DAY

    # What the Reddit daemon does.

    #: ID of an app registered with Reddit. Unset: PRAW's own: praw_client_id in the environment, or praw.ini.
    reddit_client_id: SecretStr | None = None
    #: That app's secret. Unset: PRAW's own.
    reddit_client_secret: SecretStr | None = None
    #: Who asks, as Reddit wants it: <platform>:<app ID>:<version> (by /u/<user>).
    reddit_user_agent: Annotated[str, _form(r"[ -~]{7,200}", "7 to 200 printable ASCII characters")] | None = None
    #: Section of praw.ini with the credentials. Unset: DEFAULT.
    reddit_site: str | None = None
    #: Another server that speaks Reddit's API; it is sent the credentials. Unset: Reddit's own.
    reddit_url: Annotated[str, _form(r"https?://[^/?#\s]+", "an address such as http://127.0.0.1:8080")] | None = None
    #: Topics and their subreddits, in TOML; `feedmill ingest topics` prints the default.
    reddit_topics: Path | None = None
    #: Seconds between two looks at a topic's new posts.
    reddit_poll_interval: Seconds = 60.0
    #: Requests a minute, at most; Reddit's own budget, which its answers state, counts where it is smaller.
    reddit_requests_per_minute: Count = 90
    #: Seconds that Reddit may take to begin an answer, and between two parts of it.
    reddit_timeout: Seconds = 15.0
    #: Seconds for which a post that is gone from Reddit, or was purged, is remembered by its id alone, and refused.
    tombstone_ttl: Count = 365 * DAY

    # What workers do.

    #: A folder with a transformers model, package:NAME for one in an installed package, or its name on the model hub.
    #: The embedded one, the default, needs no hub.
    model: str = "sentence-transformers/all-MiniLM-L6-v2"
    #: Branch, tag or commit of a model from the hub; a commit pins it.
    revision: Annotated[str, _form(r"[A-Za-z0-9._/-]{1,128}", "a branch, tag or commit")] | None = None
    #: Never ask the hub: models are taken from folders, packages and what was downloaded before.
    offline: bool = False
    #: Run Python code that a model brings along. It can do whatever this user can: read it first, and pin `revision`.
    trust_remote_code: bool = False
    #: nli, sequence or similarity (docs/models.md); auto reads it off the model's files. Or module:Class, for
    #: one of your own (docs/extending.md).
    classifier: Annotated[
        str, _form(rf"auto|nli|sequence|similarity|{OWN}", "auto, nli, sequence, similarity or module:Class")
    ] = "auto"
    #: torch, or onnx: ONNX Runtime, with its TensorRT, CUDA or CPU provider, whichever is there in that order. Or
    #: module:Class, for one of your own.
    engine: Annotated[str, _form(rf"torch|onnx|{OWN}", "torch, onnx or module:Class")] = "torch"
    #: Folder below which a model must lie that `feedmill deploy` may have this worker load. Unset: any of this machine.
    models_folder: Path | None = None
    #: auto, cpu, cuda, cuda:N or mps.
    device: Annotated[str, _form(r"auto|cpu|mps|cuda(:[0-9]+)?", "auto, cpu, cuda, cuda:N or mps")] = "auto"
    #: Devices that `feedmill worker` serves, with a process for each: all, GPUs by their numbers such as 0,2, cpu, or
    #: cpu:N for N workers that share the CPU's cores. Unset: the one that `device` says.
    devices: Annotated[str, _form(DEVICES, "all, GPUs' numbers such as 0,2, cpu or cpu:N")] | None = None
    #: auto takes float16 on a GPU, bfloat16 on a CPU that has it in hardware (engine torch), else float32. int8 is
    #: dynamic quantisation, for engine onnx on a CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    #: Labels for messages that name none: comma-separated, or a JSON list, or a JSON object that gives each label's
    #: description, or a list of them. Unset: the sixteen topics of shared/topics.py.
    labels: Annotated[Labels | None, NoDecode] = None
    #: The sentence a label is put into; {} marks the place. Unset: "This example is {}." where the classifier is nli,
    #: as in transformers' pipeline; "This post is about {}." where it is similarity.
    template: Template | None = None
    #: Tokens of a post that are read, at most; never more than the model can take.
    max_tokens: Annotated[int, Field(ge=8)] = 256
    #: Tokens of one micro-batch, at most: its longest row times its rows. Unset: measured at the first start.
    token_budget: Count | None = None
    #: Rows of one micro-batch, at most.
    batch_rows: Count = 256
    #: Rows that wait for the device, beyond which no further message is fetched. Wider windows pad less, wait longer.
    window_rows: Count = 1024
    #: Seconds of the device's work, as fast as it was lately, beyond which no further message is fetched either: what a
    #: slow device holds does not wait there while a fast one has nothing left to do.
    prefetch_seconds: Seconds = 2.0
    #: Run the model through torch.compile: needs a C++ compiler, takes a minute at each start. Measure it first.
    compile: bool = False
    #: Seconds after which a forward pass, another call of a classifier, or the trial of a deployed model counts as
    #: hanging, and ends the worker. An application's own task that takes longer without a time limit is logged.
    forward_timeout: Seconds = 300.0
    #: Seconds between two lines of statistics in the worker's log.
    statistics_interval: Seconds = 60.0
    #: Folder of what a worker measured once and need not measure again; it may be deleted.
    cache_folder: Path = Path("~/.cache/feedmill")
    #: Modules with Celery tasks of your own for the worker to load, separated by commas (docs/celery.md).
    include: Annotated[tuple[str, ...], NoDecode] = ()
    #: Store the state STARTED when a message's first row enters a forward pass; costs a round trip a message.
    track_started: bool = False
    #: Where Celery's results go: redis, or rpc, straight to the sender's reply queue.
    celery_results: Literal["redis", "rpc"] = "redis"
    #: Seconds that a worker takes on SIGTERM to finish what it holds; the rest goes back to the queue.
    drain: Seconds = 30.0
    #: Seconds after which a message held by a vanished worker is delivered again. A living one renews its claim.
    visibility_timeout: Annotated[int, Field(ge=3)] = 6

    #: Deliveries of a message after which it becomes a dead letter, unread, when each time its worker vanished, and
    #: from the third on while it handled that message alone. What ends a worker in a forward pass is found sooner.
    max_deliveries: Annotated[int, Field(ge=3)] = 5

    # What trainers do.

    #: Folder of queued trainings: models are written there, and files that are trained on are read there. Whoever may
    #: publish can ask for a training, and reaches no file elsewhere.
    training_folder: Path = Path("~/.local/share/feedmill/training")

    # What stays in Redis.

    #: Seconds a result lives.
    results_ttl: Count = 7 * DAY
    #: Seconds for which the counts by label and hour are kept.
    label_counts_ttl: Count = 30 * DAY
    #: Entries kept in the results stream (about; Redis trims by whole nodes).
    results_stream_length: Count = 100_000
    #: Entries kept in the dead-letter stream (about): posts that could not be classified, each with the reason.
    dead_letters_length: Count = 10_000
    #: Characters of a post's body that its stream entry carries.
    stream_body: Annotated[int, Field(ge=0)] = 500
    #: Seconds that Celery keeps a message's result for the application that sent it.
    celery_result_ttl: Count = 3600

    # What is told.

    #: Port where a worker, or the Reddit daemon, serves its metrics to Prometheus, and says whether it is well: each
    #: process needs one of its own; of several `devices` the second takes the next one, and so on. Unset, or 0: none.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    #: Address that metrics are served on; whoever reaches it can read them. Unset: this machine alone.
    metrics_address: Annotated[str, _form(r"[A-Za-z0-9.:_-]{1,253}", "an address or a name of this machine")] = (
        "127.0.0.1"
    )
    #: User of Flower's pages and of its REST API.
    flower_user: Annotated[
        str, _form(r"[!-9;-~]{1,64}", "1 to 64 printable ASCII characters, no space and no colon among them")
    ] = "feedmill"
    #: That user's password. Unset: made anew at each start of Flower, and shown once.
    flower_password: SecretStr | None = None
    #: What a line of the log is, on standard error: text, for people, or an object of JSON.
    log_format: Literal["text", "json"] = "text"
    #: What is logged: events of this level, and graver ones.
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("labels", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        """Labels that hold commas, or have descriptions, are given as JSON."""
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"begins as JSON, but is none: {json_problem(error)}") from None

    @field_validator("include", mode="before")
    @classmethod
    def _from_names(cls, value: object) -> object:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value

    @field_validator("devices")
    @classmethod
    def _is_one_way(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Each device once, and not said in two ways."""
        if value is None:
            return None
        if info.data.get("device", "auto") != "auto":
            raise ValueError(f"says which devices to use, and so does {PREFIX}DEVICE, or --device: give one of them")
        twice = [number for number, times in Counter(value.split(",")).items() if times > 1]
        if twice:
            raise ValueError(f"names the GPU {twice[0]} more than once: a device has one worker")
        return value

    @field_validator("flower_password")
    @classmethod
    def _is_ascii(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[ -~]{1,256}", value.get_secret_value()):
            raise ValueError("should be 1 to 256 printable ASCII characters")
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            address.parse(value.get_secret_value())
        return value

    @field_validator("redis_ca_file", "redis_certificate_file", "redis_key_file")
    @classmethod
    def _is_for_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        certificate = info.data.get("redis_certificate_file") if info.field_name == "redis_key_file" else None
        if value is None:
            if certificate:
                raise ValueError(f"must be set, to the key of {PREFIX}REDIS_CERTIFICATE_FILE")
            return None
        _only_for("rediss", info)
        value = value.expanduser().absolute()
        context = ssl.create_default_context()
        try:
            value.read_bytes()
            if info.field_name == "redis_ca_file":
                context.load_verify_locations(value)
            elif certificate:
                context.load_cert_chain(certificate, value, password="")
        except ssl.SSLError as error:
            raise ValueError(f"{value} should be in PEM, without a passphrase, and fit ({error.reason})") from None
        except OSError as error:
            raise ValueError(f"{value} cannot be read: {error.strerror}") from None
        return value

    @field_validator("redis_master", "redis_sentinel_password")
    @classmethod
    def _is_for_sentinels(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            _only_for("sentinel", info)
        elif info.field_name == "redis_master" and _scheme(info) == "sentinel":
            raise ValueError(f"must be set, to what the Sentinels of {PREFIX}REDIS_URL call the master")
        return value

    @field_validator("data_folder", "cache_folder", "models_folder", "reddit_topics", "training_folder")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @property
    def broker_url(self) -> str:
        """The address of Redis with its password: for opening connections, never for people to read."""
        if self.redis_url is not None:
            return self.redis_url.get_secret_value()
        if not stack_runs(self.data_folder):
            return FALLBACK_REDIS_URL
        try:
            return str(json.loads((self.data_folder / STACK_FILE).read_text())["redis_url"])
        except FileNotFoundError:
            return FALLBACK_REDIS_URL
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(
                f"{self.data_folder / STACK_FILE} should hold the address of the running `feedmill up`, "
                f"but cannot be read ({error}). Set {PREFIX}REDIS_URL instead, or delete the file."
            ) from None

    @property
    def redis(self) -> address.Address:
        """The address of Redis in its parts, its password among them."""
        return address.parse(self.broker_url)

    @property
    def redis_address(self) -> str:
        """The address of Redis for people to read: no user, no password."""
        found = self.redis
        places = ", ".join(f"{host}:{port}" for host, port in found.hosts)
        if found.scheme == "sentinel":
            return f"{self.redis_master}/{found.database} of the Sentinels {places}"
        return f"{places}/{found.database}"


def _scheme(info: ValidationInfo) -> str:
    """That of the address, once it was found good; "redis" where none is set: so is the embedded stack's."""
    url = info.data.get("redis_url")
    return "redis" if url is None else address.parse(url.get_secret_value()).scheme


def _only_for(scheme: str, info: ValidationInfo) -> None:
    """Refuse what has no effect with another kind of address: whoever names certificates means to be encrypted."""
    if "redis_url" in info.data and (found := _scheme(info)) != scheme:
        how = f"begins with {found}://" if info.data["redis_url"] else "is not set"
        raise ValueError(f"is for {scheme}:// addresses, but {PREFIX}REDIS_URL {how}")


def stack_runs(folder: Path) -> bool:
    """Look whether a running `feedmill up` has its data in the folder and has announced its address.

    A stack that was killed leaves its file behind, and another program may listen at that address since.
    """
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (folder / STACK_FILE).exists()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SettingsError(
            f"Cannot look whether `feedmill up` runs: {folder / LOCK_FILE} cannot be read ({error.strerror}). "
            f"Set {PREFIX}REDIS_URL instead."
        ) from None
    return False


def load(**flags: Any) -> Settings:
    """Settings from the given flags (None: not given), then the environment, then the defaults.

    Raises SettingsError with the variable's name and what it should be.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        field, reason = first_problem(error)
        name, _, place = field.partition(".")
        shown = f"--{name.replace('_', '-')}" if name in given else f"{PREFIX}{name.upper()}"
        raise SettingsError(f"{shown}: {f'{place}: ' if place else ''}{reason}.") from None


def variables(settings: Settings) -> dict[str, str]:
    """The environment that gives a child process these settings: all that were given, but secrets."""
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
    """A sentence about each variable of the environment that looks like a setting and is none."""
    for variable in sorted(os.environ):
        name = variable.lower().removeprefix(PREFIX.lower())
        if name != variable.lower() and name not in Settings.model_fields:
            nearest = get_close_matches(name, Settings.model_fields, 1)
            meant = f"; is {PREFIX}{nearest[0].upper()} meant?" if nearest else ""
            yield f"{variable} is no setting and has no effect{meant}"
