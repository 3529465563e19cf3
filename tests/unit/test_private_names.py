"""Private names of libraries, on which the code relies: each is listed, and still exists.

An upgrade that removes one fails here, with the name and the module that needs it.
"""

import ast
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

from tests.size import ROOT, product_files

CHANNEL = "kombu.transport.redis:Channel"
POLLER = "kombu.transport.redis:MultiChannelPoller"
VIRTUAL = "kombu.transport.virtual.base:Transport"
CONNECTION = "redis.connection:AbstractConnection"
REDIS_POOL = "redis.connection:ConnectionPool"
ONEDNN = "torch.ops:mkldnn"

#: File -> where the name is defined -> names.
PRIVATE_NAMES = {
    "feedmill/monitoring/dashboard.py": {
        "flower.inspector:Inspector": ["_inspect", "_on_update"],
        CONNECTION: ["_sock"],
    },
    "feedmill/testing/memory.py": {
        "celery:Celery": ["_backend_cache", "_pool"],
        "celery.app.amqp:AMQP": ["_producer_pool"],
        "celery.backends.base:KeyValueStoreBackend": ["_ensure_not_eager"],
    },
    "feedmill/training/finetune.py": {
        "transformers:Trainer": ["_get_train_sampler", "_load_from_checkpoint"],
        "transformers:TrainingArguments": ["_n_gpu"],
    },
    "producers/live/exchange.py": {
        "urllib3.connection:HTTPConnection": ["_dns_host", "_new_conn"],
    },
    "producers/live/http.py": {"requests:Response": ["_content"]},
    "shared/bindings.py": {CHANNEL: ["_active_queues", "_queue_bind"]},
    "shared/interrupts.py": {
        "atexit:": ["_run_exitfuncs"],
        "sys:": ["_current_exceptions"],
    },
    "workers/app.py": {"celery:Celery": ["_get_backend"]},
    "workers/models/bounds.py": {
        "transformers.models.auto.auto_factory:_BaseAutoModelClass": ["_from_config"],
        "transformers:PreTrainedModel": ["_from_config"],
    },
    "workers/models/device.py": {ONEDNN: ["_is_mkldnn_bf16_supported"]},
    "workers/models/engines/bert.py": {
        ONEDNN: ["_linear_pointwise", "_reorder_linear_weight"],
    },
    "workers/models/engines/network.py": {
        "transformers:T5PreTrainedModel": ["_shift_right"],
    },
    "workers/models/engines/spreading.py": {
        "transformers:PreTrainedModel": ["_no_split_modules"],
    },
    "shared/tracing.py": {
        "opentelemetry.sdk.trace.export:BatchSpanProcessor": ["_batch_processor"],
    },
    "workers/models/engines/torch_engine.py": {
        ONEDNN: ["_linear_pointwise", "_reorder_linear_weight"],
    },
    "workers/pipeline/pipeline.py": {"sys:": ["_current_frames"]},
    "workers/runtime/connections.py": {
        CONNECTION: ["_sock"],
        REDIS_POOL: ["_available_connections", "_in_use_connections", "_lock"],
        "kombu.resource:Resource": ["_dirty", "_resource"],
        "kombu:Connection": ["_transport"],
        CHANNEL: ["_pool"],
    },
    "workers/runtime/consumer.py": {
        "celery.worker.consumer:Consumer": [
            "_limit_move_to_pool",
            "_limit_task",
            "_schedule_bucket_request",
        ],
    },
    "workers/runtime/pool.py": {"celery.concurrency.base:BasePool": ["_get_info"]},
    "workers/runtime/replies.py": {"kombu.pidbox:Mailbox": ["_publish_reply"]},
    "workers/runtime/request.py": {
        "celery.worker.request:Request": ["_announce_revoked", "_argsrepr", "_kwargsrepr"],
    },
    "workers/transport/leases.py": {CHANNEL: ["_get_pool"]},
    "workers/transport/redis_transport.py": {
        CHANNEL: [
            "_brpop_read",
            "_brpop_sent_at",
            "_closing",
            "_connparams",
            "_delete",
            "_flush_brpop_reauth",
            "_in_poll",
            "_on_connection_disconnect",
            "_poll_error",
            "_queue_bind",
            "_queue_cycle",
            "_size",
            "_update_queue_cycle",
        ],
        POLLER: [
            "_channels", "_client_registered", "_fd_to_chan", "_in_protected_read", "_register",
            "_register_BRPOP", "_register_LISTEN", "_update_brpop_polling",
        ],
        "kombu.transport.redis:": ["_socket_readable"],
        VIRTUAL: ["_avail_channels", "_callbacks", "_deliver"],
        "kombu.transport.virtual.base:QoS": ["_delivered", "_on_collect"],
        CONNECTION: ["_sock"],
    },
}  # fmt: skip
#: Underscored names that libraries document.
PUBLIC = frozenset(
    ["_abc_impl", "_asdict", "_exit", "_fields", "_getframe", "_replace", "_repr_html_"]
)
NAMES = [
    pytest.param(file, owner, name, id=f"{file}-{owner}.{name}")
    for file, owners in PRIVATE_NAMES.items()
    for owner, names in owners.items()
    for name in names
]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return the private names that the product's own classes and modules define."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def overridden(file: str) -> set[str]:
    """Return the private names of libraries that a file's classes override."""
    place = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if not place.startswith("feedmill"):
        place = f"feedmill.{place}"
    module = importlib.import_module(place)
    names = set()
    for value in vars(module).values():
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        for name in filter(is_private, vars(value)):
            bases = [base for base in value.__mro__[1:] if name in vars(base)]
            if bases and is_of_library(bases[0]):
                names.add(name)
    return names


def name_read_by(call: ast.Call) -> list[str]:
    """Return the literal name that a call of `getattr` reads; none if it is computed."""
    name = call.args[1]
    return (
        [name.value]
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
        else []
    )


def is_of_library(cls: type) -> bool:
    """Return whether a class is of a library that may change with an upgrade."""
    package = cls.__module__.partition(".")[0]
    return package not in ("feedmill", "abc", "builtins", "enum", "pydantic", "typing")


@pytest.mark.parametrize(("file", "owner", "name"), NAMES)
def test_private_names_still_exist(file: str, owner: str, name: str) -> None:
    module, _, attribute = owner.partition(":")
    if module == "torch.ops":
        torch: Any = importlib.import_module("torch")
        assert hasattr(getattr(torch.ops, attribute), name), file
        return
    thing = (
        pkgutil.resolve_name(owner) if attribute else importlib.import_module(module)
    )
    # A name that only instances have stands in the class' code.
    assert hasattr(thing, name) or name in inspect.getsource(thing), file


def test_docstrings_list_the_private_names_that_a_module_relies_on() -> None:
    for file, owners in PRIVATE_NAMES.items():
        docstring = ast.get_docstring(ast.parse((ROOT / file).read_text()))
        for names in owners.values():
            missing = [name for name in names if f"`{name}`" not in str(docstring)]
            assert not missing, f"{file}: list {missing} in the module's docstring"


def test_every_private_name_of_a_library_is_listed() -> None:
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in product_files()
    }
    own = own_names(trees)
    for file, tree in trees.items():
        names = set() if file.endswith("__main__.py") else overridden(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                names.update({node.attr} - own)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                names.update(filter(is_private, name_read_by(node)))
        owners = PRIVATE_NAMES.get(file, {})
        listed = {name for names_of_owner in owners.values() for name in names_of_owner}
        assert names <= listed, f"{file} relies on {names - listed}"
