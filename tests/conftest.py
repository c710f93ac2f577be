from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from cutegemm.testing import poison

hypothesis.settings.register_profile("cutegemm", deadline=None)  # a first call may load or build something
hypothesis.settings.load_profile("cutegemm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is false")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small products: on a busy machine torch's threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> None:
    """What a GPU test allocates starts as NaN (and -1), so that a read of memory that nothing wrote shows."""
    if request.node.get_closest_marker("gpu"):
        poison()
