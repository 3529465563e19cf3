"""ONNX graphs: of a small model, exported once for all tests, and one written by hand."""

import fcntl
from pathlib import Path
from typing import NamedTuple

import numpy as np


class ExportedModel(NamedTuple):
    """The folder of a model, and a cache folder with its graph in float32."""

    folder: Path
    cache: Path


def export_once(shared: Path) -> ExportedModel:
    """Make a BERT of one layer for NLI and export it, unless another process did.

    shared: a folder of all test processes.
    """
    # imported here: every test process imports this module, but few use ONNX
    from feedmill.shared.settings import Settings  # noqa: PLC0415
    from feedmill.workers.models.classifiers.registry import (  # noqa: PLC0415
        load_classifier,
    )
    from feedmill.workers.models.device import select_device  # noqa: PLC0415
    from tests.fakes.models import NLI, make_model  # noqa: PLC0415

    shared.mkdir(exist_ok=True)
    model = ExportedModel(shared / "bert", shared / "cache")
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            make_model("bert", model.folder, NLI, num_hidden_layers=1)
            settings = Settings(
                model=str(model.folder), cache_folder=model.cache, engine="onnx"
            )
            device = select_device("cpu", settings.dtype, settings.engine)
            load_classifier(settings, device)
            (shared / "done").touch()
    return model


def write_graph_that_reads_padding(path: Path, labels: int) -> Path:
    """Write a graph whose scores are the mean of all token ids of a row, padding included."""
    from onnx import TensorProto, helper, numpy_helper, save  # noqa: PLC0415

    shape = ["rows", "tokens"]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)
    mask = helper.make_tensor_value_info("mask", TensorProto.INT64, shape)
    scores = helper.make_tensor_value_info(
        "scores", TensorProto.FLOAT, ["rows", labels]
    )
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["numbers", "axes"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "factors"], ["scores"]),
    ]
    factors = numpy_helper.from_array(
        np.arange(1, labels + 1, dtype=np.float32)[None], "factors"
    )
    axes = numpy_helper.from_array(np.array([1]), "axes")
    graph = helper.make_graph(
        nodes, "padding", [ids, mask], [scores], initializer=[factors, axes]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    save(model, path)
    return path
