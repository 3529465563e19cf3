"""feedmill/stack/supervisor.py: devices and CPU cores of each worker."""

import os
from pathlib import Path

import pytest

from feedmill.shared.errors import SettingsError
from feedmill.stack import supervisor
from feedmill.stack.supervisor import Share, cores_by_package, divide, shares
from tests.support import naming

#: Code of a stand-in for torch in the process that counts GPUs.
TORCH = """
class cuda:
    @staticmethod
    def device_count():
        return {gpus}
"""


def processors(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers))


def machine(folder: Path, packages: dict[int, list[str]]) -> Path:
    """Write a machine's topology as the kernel shows it. packages: package -> the thread siblings
    of each core.
    """
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
    """Three GPUs reported by torch, on a machine of eight cores."""
    for variable in (supervisor.VISIBLE_DEVICES, *supervisor.THREAD_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "torch.py"
    file.write_text(TORCH.format(gpus=3))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    processors(monkeypatch, *range(8))
    monkeypatch.setattr(supervisor, "PROCESSORS", tmp_path)  # an empty topology
    return file


def test_keeps_packages_and_threads_of_a_core_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Use a common numbering: packages alternate, and second threads follow all first threads."""
    monkeypatch.setattr(
        supervisor,
        "PROCESSORS",
        machine(tmp_path, {0: ["0,4", "2,6"], 1: ["1,5", "3,7"]}),
    )
    processors(monkeypatch, *range(8))
    cores = cores_by_package()
    assert [sorted(core) for core in cores] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert divide(cores, 2) == [
        (frozenset({0, 2, 4, 6}), 2),
        (frozenset({1, 3, 5, 7}), 2),
    ]
    assert divide(cores, 3) == [
        (frozenset({0, 4}), 1),
        (frozenset({2, 6}), 1),
        (frozenset({1, 3, 5, 7}), 2),
    ]


def test_excludes_cpus_outside_affinity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        supervisor,
        "PROCESSORS",
        machine(tmp_path, {0: ["0,4", "2,6"], 1: ["1,5", "3,7"]}),
    )
    processors(monkeypatch, 1, 4, 6)
    assert cores_by_package() == [{4}, {6}, {1}]


def test_assigns_every_core_to_exactly_one_worker() -> None:
    cores = [frozenset({number}) for number in range(13)]
    assert divide(cores[:2], 3) == [(frozenset(), 1)] * 3
    for workers in range(1, 14):
        parts = [processors for processors, _ in divide(cores, workers)]
        assert sorted(number for part in parts for number in part) == list(range(13))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.usefixtures("gpus")
def test_all_shares_the_cores_among_the_gpus() -> None:
    found = shares("all")
    assert [share.name for share in found] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {share.device for share in found} == {"cuda"}
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == [
        "0",
        "1",
        "2",
    ]
    assert [share.environment["OMP_NUM_THREADS"] for share in found] == ["2", "3", "3"]
    assert [sorted(share.processors) for share in found] == [
        [0, 1],
        [2, 3, 4],
        [5, 6, 7],
    ]


@pytest.mark.usefixtures("gpus")
def test_selects_from_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7,GPU-8f2a")
    assert [share.name for share in shares("2,1")] == ["cuda:GPU-8f2a", "cuda:7"]
    assert shares("1") == [Share("cuda", "cuda:7", {"CUDA_VISIBLE_DEVICES": "7"})]
    with pytest.raises(SettingsError, match=r"FEEDMILL_DEVICES.*\b3\b"):
        shares("0,3")


@pytest.mark.usefixtures("gpus")
def test_workers_on_one_gpu_have_names_and_a_share_of_its_memory() -> None:
    found = shares("1,0,1")
    assert [share.name for share in found] == ["cuda:1", "cuda:0", "cuda:1-1"]
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == [
        "1",
        "0",
        "1",
    ]
    assert [share.environment.get("FEEDMILL_DEVICE_MEMORY") for share in found] == [
        "0.450",
        None,
        "0.450",
    ]
    assert len({share.node(None) for share in found}) == 3


@pytest.mark.usefixtures("gpus")
def test_a_worker_may_have_several_gpus() -> None:
    found = shares("0+2,1")
    assert [share.name for share in found] == ["cuda:0+2", "cuda:1"]
    # as the worker numbers those that it sees
    assert [share.device for share in found] == ["cuda:0+1", "cuda"]
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == [
        "0,2",
        "1",
    ]
    for wanted, wrong in (("0+3", "3"), ("1+1", naming("1+1"))):
        with pytest.raises(SettingsError, match=wrong):
            shares(wanted)


@pytest.mark.usefixtures("gpus")
def test_cpu_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = shares("cpu:2")
    assert first == Share(
        "cpu", "cpu:0", {"RAYON_NUM_THREADS": "4"}, frozenset({0, 1, 2, 3})
    )
    assert second == Share(
        "cpu", "cpu:1", {"RAYON_NUM_THREADS": "4"}, frozenset({4, 5, 6, 7})
    )
    with pytest.raises(SettingsError, match=naming("cpu:9", 8)):
        shares("cpu:9")
