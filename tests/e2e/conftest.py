"""Clusters that end with their tests, and show their logs when one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.embedded import EmbeddedCluster

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.session.stash[_FAILED] = True
    return report


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., EmbeddedCluster]]:
    """Starts a cluster for the tests of one file."""
    clusters: list[EmbeddedCluster] = []

    def start_one(*arguments: str) -> EmbeddedCluster:
        cluster = EmbeddedCluster(tmp_path_factory.mktemp("kvist"))
        clusters.append(cluster)
        cluster.up(*arguments)
        return cluster

    request.session.stash[_FAILED] = False
    yield start_one
    for cluster in clusters:
        if request.session.stash[_FAILED]:
            print(cluster.logs())
        cluster.down()
