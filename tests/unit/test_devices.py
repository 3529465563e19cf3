"""feedmill/devices.py: which devices get a worker, and which cores."""

import os
import socket
from pathlib import Path

import pytest

from feedmill import devices
from feedmill.devices import Share, divide, find_cores, shares
from shared.errors import SettingsError, UserError

#: In place of torch, in the process that is asked for the number of GPUs.
TORCH = """
class cuda:
    @staticmethod
    def device_count():
        return {gpus}
"""


def processors(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers))


def machine(folder: Path, packages: dict[int, list[str]]) -> Path:
    """What a kernel tells of a machine: by package, the siblings of each core."""
    for package, cores in packages.items():
        for siblings in cores:
            for number in siblings.split(","):
                topology = folder / f"cpu{number}" / "topology"
                topology.mkdir(parents=True)
                (topology / "physical_package_id").write_text(f"{package}\n")
                (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    return folder


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three GPUs, as far as torch can tell, on a machine of eight cores."""
    for variable in (devices.VISIBLE, *devices.THREAD_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "torch.py"
    file.write_text(TORCH.format(gpus=3))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    processors(monkeypatch, *range(8))
    monkeypatch.setattr(devices, "PROCESSORS", tmp_path)  # it tells nothing
    return file


def test_cores_of_a_package_and_threads_of_a_core_stay_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numbered as many machines number them: packages by turns, second threads after all first ones."""
    folder = machine(tmp_path, {0: ["0,4", "2,6"], 1: ["1,5", "3,7"]})
    processors(monkeypatch, *range(8))
    cores = find_cores(folder)
    assert [sorted(core) for core in cores] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert divide(cores, 2) == [(frozenset({0, 2, 4, 6}), 2), (frozenset({1, 3, 5, 7}), 2)]
    assert divide(cores, 3) == [(frozenset({0, 4}), 1), (frozenset({2, 6}), 1), (frozenset({1, 3, 5, 7}), 2)]


def test_processors_that_this_process_may_not_use_are_nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = machine(tmp_path, {0: ["0,4", "2,6"], 1: ["1,5", "3,7"]})
    processors(monkeypatch, 1, 4, 6)
    assert find_cores(folder) == [{4}, {6}, {1}]


def test_a_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processors(monkeypatch, 3, 1, 2)
    assert find_cores(tmp_path) == [{1}, {2}, {3}]


def test_fewer_cores_than_workers() -> None:
    assert divide([frozenset({0}), frozenset({1})], 3) == [(frozenset(), 1)] * 3


def test_every_core_is_somebodys_and_no_ones_twice() -> None:
    cores = [frozenset({number}) for number in range(13)]
    for workers in range(1, 14):
        parts = [processors for processors, _ in divide(cores, workers)]
        assert sorted(number for part in parts for number in part) == list(range(13))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.usefixtures("gpus")
def test_all_gpus() -> None:
    found = shares("all")
    assert [share.name for share in found] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {share.device for share in found} == {"cuda"}
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == ["0", "1", "2"]
    assert [share.environment["OMP_NUM_THREADS"] for share in found] == ["2", "3", "3"]
    assert [sorted(share.processors) for share in found] == [[0, 1], [2, 3, 4], [5, 6, 7]]


@pytest.mark.usefixtures("gpus")
def test_some_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7,GPU-8f2a")
    assert [share.name for share in shares("2,1")] == ["cuda:GPU-8f2a", "cuda:7"]
    assert shares("1") == [Share("cuda", "cuda:7", {"CUDA_VISIBLE_DEVICES": "7"})]
    with pytest.raises(SettingsError, match=r"FEEDMILL_DEVICES: GPU 3 .* 3 CUDA devices"):
        shares("0,3")


def test_all_where_there_is_no_gpu_is_the_cpu(gpus: Path) -> None:
    gpus.write_text(TORCH.format(gpus=0))
    assert shares("all") == shares("cpu") == [Share("cpu", "cpu:0", {})]
    with pytest.raises(SettingsError, match=r"FEEDMILL_DEVICES: GPU 0 .* 0 CUDA devices"):
        shares("0")


def test_a_torch_that_fails(gpus: Path) -> None:
    gpus.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    with pytest.raises(UserError, match=r"because torch fails: ImportError: libcudart.so.13: cannot"):
        shares("all")


@pytest.mark.usefixtures("gpus")
def test_a_part_of_the_cores_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = shares("cpu:2")
    assert first == Share("cpu", "cpu:0", {"RAYON_NUM_THREADS": "4"}, frozenset({0, 1, 2, 3}))
    assert second == Share("cpu", "cpu:1", {"RAYON_NUM_THREADS": "4"}, frozenset({4, 5, 6, 7}))
    with pytest.raises(SettingsError, match=r"FEEDMILL_DEVICES: cpu:9 needs one core per worker.* only 8\. Set cpu:8"):
        shares("cpu:9")


def test_names_of_nodes() -> None:
    share = Share("cuda", "cuda:2", {})
    assert share.node(None) == f"feedmill-cuda:2@{socket.gethostname()}"
    assert share.node("mill") == f"mill-cuda:2@{socket.gethostname()}"
    assert share.node("mill@here") == "mill-cuda:2@here"
